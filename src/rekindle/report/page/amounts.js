// What the page's parts share: the data, amounts as the terminal spells them, colours with hatches.
// The parts stand one after the other in one function (see html.py), so they see each other's names.

const D = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);

// ---- amounts, spelled as the terminal spells them

const scaled = (amount, units, step) => {
  let value = amount, k = 0;
  while (k < units.length - 1 && Math.abs(value) >= step) { value /= step; k += 1; }
  return k === 0 ? `${Math.round(amount)} ${units[0]}` : `${value.toFixed(2)} ${units[k]}`;
};
const size = (n) => D.unit.size === "bytes"
  ? scaled(n, ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"], 1024)
  : `${Math.round(n).toLocaleString("en-US")} ${D.unit.size}`;
const cost = (n) => D.unit.cost === "ns"
  ? scaled(n, ["ns", "us", "ms", "s"], 1000)
  : `${Math.round(n).toLocaleString("en-US")} ${D.unit.cost}`;
const percent = (share) => {
  const text = `${share < 0 ? "" : "+"}${(100 * share).toFixed(1)} %`;
  return /^-0\.0 /.test(text) ? "+0.0 %" : text;
};
const short = (n, units, step) => {
  let value = n, k = 0;
  while (k < units.length - 1 && value >= step) { value /= step; k += 1; }
  return `${+value.toPrecision(4)} ${units[k]}`;
};
const tick = (n) => n === 0 ? "0" : D.unit.size === "bytes"
  ? short(n, ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"], 1024) : n.toLocaleString("en-US");
const timeTick = (n) => n === 0 ? "0" : D.unit.cost === "ns"
  ? short(n, ["ns", "us", "ms", "s"], 1000) : n.toLocaleString("en-US");
const el = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};

// ---- colours that colour-blind people can tell apart (Okabe and Ito), each with its own hatch

const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C8F94"];
const LANE_COLOURS = ["#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7"];
const HATCHES = [
  () => {},
  (c, n) => { c.moveTo(-1, n + 1); c.lineTo(n + 1, -1); c.moveTo(-n / 2, n / 2); c.lineTo(n / 2, -n / 2); c.moveTo(n / 2, n * 1.5); c.lineTo(n * 1.5, n / 2); },
  (c, n) => { c.moveTo(n / 2 + n / 9, n / 2); c.arc(n / 2, n / 2, n / 9, 0, 7); },
  (c, n) => { c.moveTo(-1, -1); c.lineTo(n + 1, n + 1); c.moveTo(-n / 2, n / 2); c.lineTo(n / 2, n * 1.5); c.moveTo(n / 2, -n / 2); c.lineTo(n * 1.5, n / 2); },
  (c, n) => { c.moveTo(0, n / 2); c.lineTo(n, n / 2); },
  (c, n) => { c.moveTo(n / 2, 0); c.lineTo(n / 2, n); },
  (c, n) => { c.moveTo(0, n / 2); c.lineTo(n, n / 2); c.moveTo(n / 2, 0); c.lineTo(n / 2, n); },
  () => {},
];
const tiles = new Map();
const paint = (context, colour, hatch) => {
  const key = `${colour} ${hatch}`;
  if (!tiles.has(key)) {
    const n = Math.round(9 * devicePixelRatio);
    const tile = el("canvas", { width: n, height: n });
    const c = tile.getContext("2d");
    c.fillStyle = colour;
    c.fillRect(0, 0, n, n);
    c.strokeStyle = "rgba(0,0,0,.34)";
    c.lineWidth = Math.max(1, n / 9);
    c.beginPath();
    HATCHES[hatch](c, n);
    c.stroke();
    tiles.set(key, tile);
  }
  return context.createPattern(tiles.get(key), "repeat");
};
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
