// The picture: memory stacked by band on uPlot's axes, lines over it, lanes under it.

// ---- the state of the picture

const count = D.steps.length;
const ends = { step: D.numSteps, time: D.cost };
const LINES = [
  ["budget", "budget", D.budget, "budget", [8, 5]],
  ["keepAll", "everything saved (keep-all)", D.keepAllPeak, "ghost", [3, 3]],
  ["measured", "measured peak", D.measured, "measured", [10, 3, 2, 3]],
].filter((line) => line[2] !== null);
// A line far above everything else would flatten the picture: it starts hidden.
const high = 2 * Math.max(D.peak, D.keepAllPeak);
const state = { view: 0, axis: "step", hidden: new Set(), at: null,
  lines: new Set(LINES.filter((line) => line[2] <= high).map((line) => line[0])) };
const bandColour = (view, k) => view.bands[k] === "everything else" ? 7 : k % 7;
let chart = null, xs = [], levels = [];

const peakSample = Math.max(0, D.steps.indexOf(D.peakStep));
const view = () => D.views[state.view];
const extended = (values) => [...values, values[values.length - 1]];

// Heights of the visible bands, one upon the other.
const restack = () => {
  const v = view();
  let below = new Float64Array(count + 1);
  levels = [];
  v.bands.forEach((name, k) => {
    if (state.hidden.has(name)) { levels.push(null); return; }
    const top = new Float64Array(count + 1);
    const stack = v.stacks[k];
    for (let i = 0; i <= count; i++) top[i] = below[i] + v.unit * stack[Math.min(i, count - 1)];
    levels.push([below, top]);
    below = top;
  });
};

const ceiling = () => {
  let top = Math.max(1, ...D.memory);
  for (const line of LINES) if (state.lines.has(line[0])) top = Math.max(top, line[2]);
  return top * 1.06;
};
const LANES_SHARE = 0.24;  // of the height above zero, for the lanes below it

// Ticks at round amounts of the unit that they are written in, some five to eight of them.
const splits = (u) => {
  const top = ceiling();
  const wanted = Math.max(4, Math.min(8, u.bbox.height / devicePixelRatio / 45));
  let unit = 1;
  if (D.unit.size === "bytes") while (top / (unit * 1024) >= 2) unit *= 1024;
  let each = unit / 10;
  for (const m = [2, 2.5, 2]; top / each > wanted;) { each *= m[0]; m.push(m.shift()); }
  if (unit === 1) each = Math.max(1, Math.round(each));
  const found = [];
  for (let y = 0; y <= top; y += each) found.push(y);
  return found;
};

const clipped = (u, draw) => {
  const { left, top, width, height } = u.bbox;
  u.ctx.save();
  u.ctx.beginPath();
  u.ctx.rect(left, top, width, height);
  u.ctx.clip();
  draw(u.ctx);
  u.ctx.restore();
};
const visible = (u) => {
  const { min, max } = u.scales.x;
  let a = 0, b = count;
  while (a < count && xs[a + 1] <= min) a += 1;
  while (b > a + 1 && xs[b - 1] >= max) b -= 1;
  return [a, b];
};

const drawStack = (u) => clipped(u, (c) => {
  const [a, b] = visible(u);
  const px = [], y = (v) => u.valToPos(v, "y", true);
  for (let i = a; i <= b; i++) px.push(u.valToPos(xs[i], "x", true));
  levels.forEach((level, k) => {
    if (!level) return;
    const [below, top] = level;
    c.beginPath();
    for (let i = a; i < b; i++) { const h = y(top[i]); c.lineTo(px[i - a], h); c.lineTo(px[i - a + 1], h); }
    for (let i = b - 1; i >= a; i--) { const h = y(below[i]); c.lineTo(px[i - a + 1], h); c.lineTo(px[i - a], h); }
    c.closePath();
    const colour = bandColour(view(), k);
    c.fillStyle = paint(c, COLOURS[colour], colour);
    c.fill();
  });
});

// Names where the bands are thick enough to hold them.
const drawNames = (u) => clipped(u, (c) => {
  const [a, b] = visible(u), ratio = devicePixelRatio;
  c.font = `600 ${12 * ratio}px system-ui, sans-serif`;
  c.textAlign = "center";
  c.textBaseline = "middle";
  c.lineJoin = "round";
  levels.forEach((level, k) => {
    if (!level) return;
    const [below, top] = level, name = view().bands[k];
    const half = c.measureText(name).width / 2 + 6 * ratio;
    const thick = (i) => u.valToPos(below[i], "y", true) - u.valToPos(top[i], "y", true);
    let best = null;
    for (let n = 1; n < 40; n++) {
      const x = u.bbox.left + (u.bbox.width * n) / 40;
      if (x - half < u.bbox.left || x + half > u.bbox.left + u.bbox.width) continue;
      let low = Infinity, high = -Infinity;
      for (const dx of [-half, -half / 2, 0, half / 2, half]) {
        const i = u.valToIdx(u.posToVal((x + dx - u.bbox.left) / ratio, "x"));
        const j = Math.min(Math.max(i, a), b - 1);
        low = Math.min(low, u.valToPos(below[j], "y", true));
        high = Math.max(high, u.valToPos(top[j], "y", true));
        if (thick(j) < 15 * ratio) { low = -Infinity; break; }
      }
      const room = low - high;
      if (room > 15 * ratio && (!best || room > best[0])) best = [room, x, (low + high) / 2];
    }
    if (!best) return;
    c.lineWidth = 4 * ratio;
    c.strokeStyle = ink("card");
    c.fillStyle = ink("ink");
    c.strokeText(name, best[1], best[2]);
    c.fillText(name, best[1], best[2]);
  });
});

const drawLines = (u) => {
  const ratio = devicePixelRatio, { left, width } = u.bbox, c = u.ctx;
  clipped(u, () => {
    for (const [key, label, value, colour, dash] of LINES) {
      if (!state.lines.has(key)) continue;
      c.strokeStyle = c.fillStyle = ink(colour);
      c.lineWidth = 2 * ratio;
      c.setLineDash(dash.map((n) => n * ratio));
      if (key === "keepAll") {
        c.lineWidth = 1.5 * ratio;
        c.beginPath();
        const [a, b] = visible(u);
        for (let i = a; i < b; i++) {
          const h = u.valToPos(D.keepAll[i], "y", true);
          c.lineTo(u.valToPos(xs[i], "x", true), h);
          c.lineTo(u.valToPos(xs[i + 1], "x", true), h);
        }
        c.stroke();
      } else {
        const h = Math.round(u.valToPos(value, "y", true));
        c.beginPath();
        c.moveTo(left, h);
        c.lineTo(left + width, h);
        c.stroke();
      }
      c.setLineDash([]);
    }
  });
  mark(u);
};

const mark = (u) => clipped(u, (c) => {
  const ratio = devicePixelRatio, { left, top, width } = u.bbox;
  const x = u.valToPos(xs[peakSample], "x", true), y = u.valToPos(D.peak, "y", true);
  if (x < left || x > left + width) return;
  c.beginPath();
  c.arc(x, y, 5 * ratio, 0, 7);
  c.fillStyle = ink("card");
  c.strokeStyle = ink("ink");
  c.lineWidth = 2 * ratio;
  c.fill();
  c.stroke();
  const text = `peak ${size(D.peak)}`;
  c.font = `600 ${12 * ratio}px system-ui, sans-serif`;
  const room = c.measureText(text).width + 12 * ratio;
  c.textAlign = x + room > left + width ? "right" : "left";
  c.textBaseline = "middle";
  const at = x + (c.textAlign === "left" ? 9 : -9) * ratio;
  c.lineWidth = 4 * ratio;
  c.lineJoin = "round";
  c.strokeStyle = ink("card");
  const height = y - 10 * ratio < top + 8 * ratio ? y + 12 * ratio : y - 10 * ratio;
  c.strokeText(text, at, height);
  c.fillStyle = ink("ink");
  c.fillText(text, at, height);
});

// Which lane runs when, on the same axis, below zero.
const drawLanes = (u) => {
  const ratio = devicePixelRatio, { left, width, top, height } = u.bbox, c = u.ctx;
  const zero = u.valToPos(0, "y", true), each = (top + height - zero) / (D.laneNames.length + 0.3);
  clipped(u, () => {
    c.fillStyle = ink("card");
    c.fillRect(left, zero, width, top + height - zero);
    for (const [lane, a, b, ta, tb] of D.lanes) {
      const x0 = u.valToPos(state.axis === "step" ? a : ta, "x", true);
      const x1 = u.valToPos(state.axis === "step" ? b : tb, "x", true);
      c.fillStyle = paint(c, LANE_COLOURS[lane], [0, 4, 1, 2, 3][lane]);
      c.fillRect(x0, zero + each * (lane + 0.42), Math.max(ratio, x1 - x0), each * 0.76);
    }
    if (D.turn !== null) {
      const i = D.steps.indexOf(D.turn);
      const x = Math.round(u.valToPos(xs[i], "x", true));
      c.strokeStyle = ink("soft");
      c.lineWidth = ratio;
      c.setLineDash([2 * ratio, 3 * ratio]);
      c.beginPath();
      c.moveTo(x, top);
      c.lineTo(x, top + height);
      c.stroke();
      c.setLineDash([]);
      c.fillStyle = ink("soft");
      c.font = `${11 * ratio}px system-ui, sans-serif`;
      c.textAlign = "left";
      c.textBaseline = "top";
      c.fillText("loss", x + 4 * ratio, top + 2 * ratio);
    }
  });
  c.save();  // uPlot remembers what it has set: its state must be as it left it
  c.font = `${11 * ratio}px system-ui, sans-serif`;
  c.fillStyle = ink("soft");
  c.textAlign = "right";
  c.textBaseline = "middle";
  D.laneNames.forEach((name, k) => c.fillText(name, left - 6 * ratio, zero + each * (k + 0.8)));
  c.restore();
};
