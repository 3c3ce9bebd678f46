// The page's own script: the stack with its lanes (on uPlot's axes), the trade-off, the tables.
(() => {
  "use strict";
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
  const LANE_COLOURS = ["#0072B2", "#E69F00", "#D55E00"];
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

  // ---- the state of the picture

  const count = D.steps.length;
  const ends = { step: D.numSteps, time: D.cost };
  const LINES = [
    ["budget", "budget", D.budget, "budget", [8, 5]],
    ["keepAll", "everything kept", D.keepAllPeak, "ghost", [3, 3]],
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

  // Ticks at whole binary amounts.
  const splits = (u) => {
    const top = ceiling();
    const wanted = Math.max(2, Math.min(6, u.bbox.height / devicePixelRatio / 70));
    let each = 1;
    if (D.unit.size === "bytes") {
      while (top / each > wanted) each *= 2;
    } else {
      for (const m = [2, 2.5, 2]; top / each > wanted;) { each *= m[0]; m.push(m.shift()); }
    }
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
    const zero = u.valToPos(0, "y", true), each = (top + height - zero) / 3.3;
    clipped(u, () => {
      c.fillStyle = ink("card");
      c.fillRect(left, zero, width, top + height - zero);
      for (const [lane, a, b, ta, tb] of D.lanes) {
        const x0 = u.valToPos(state.axis === "step" ? a : ta, "x", true);
        const x1 = u.valToPos(state.axis === "step" ? b : tb, "x", true);
        c.fillStyle = paint(c, LANE_COLOURS[lane], [0, 4, 1][lane]);
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

  // ---- what a step says

  const readout = (i) => {
    const step = D.steps[i], lane = D.laneNames[D.lane[i]];
    const kept = D.until[i] >= D.numSteps ? "to the end" : `until step ${D.until[i]}`;
    let fate = D.until[i] > step ? `What it makes is kept ${kept}` : "What it makes is gone after this step";
    if (D.again[i] >= 0) fate += `, and made again at step ${D.again[i]}`;
    $("readout").replaceChildren(
      el("b", {}, `Step ${step} of ${D.numSteps}: ${size(D.memory[i])}`), " ",
      el("span", { class: "lane" }, lane), " ",
      el("code", {}, D.texts[D.call[i]]), " in ", el("code", {}, D.texts[D.module[i]]),
      `. ${fate}. With everything kept: ${size(D.keepAll[i])} here.`,
    );
    view().bands.forEach((name, k) => {
      const output = $("bands").children[k]?.querySelector("output");
      if (output) output.textContent = size(view().unit * view().stacks[k][i]);
    });
  };
  const show = (i) => {
    state.at = i;
    readout(i === null ? peakSample : Math.min(i, count - 1));
  };

  // ---- legends

  const swatch = (draw) => {
    const canvas = el("canvas", { width: 22 * devicePixelRatio, height: 14 * devicePixelRatio });
    draw(canvas.getContext("2d"), canvas.width, canvas.height);
    return canvas;
  };
  const toggle = (set, key, shown) => (shown ? set.add(key) : set.delete(key));
  const legends = () => {
    $("lines").replaceChildren(...LINES.map(([key, label, value, colour, dash]) => {
      const button = el("button", { type: "button", "data-line": key, "aria-pressed": String(state.lines.has(key)) },
        swatch((c, w, h) => {
          c.strokeStyle = ink(colour);
          c.lineWidth = h / 5;
          c.setLineDash(dash.map((n) => n * devicePixelRatio * 0.7));
          c.moveTo(0, h / 2); c.lineTo(w, h / 2); c.stroke();
        }), `${label} `, el("output", {}, size(value)));
      button.addEventListener("click", () => {
        toggle(state.lines, key, !state.lines.has(key));
        button.setAttribute("aria-pressed", String(state.lines.has(key)));
        redraw();
      });
      return button;
    }));
    $("bands").replaceChildren(...view().bands.map((name, k) => {
      const button = el("button", { type: "button", "data-band": name, "aria-pressed": String(!state.hidden.has(name)) },
        swatch((c, w, h) => { const n = bandColour(view(), k); c.fillStyle = paint(c, COLOURS[n], n); c.fillRect(0, 0, w, h); }),
        `${name} `, el("output", {}, ""));
      button.addEventListener("click", () => {
        toggle(state.hidden, name, !state.hidden.has(name));
        button.setAttribute("aria-pressed", String(!state.hidden.has(name)));
        restack();
        redraw();
      });
      return button;
    }));
  };

  // ---- the chart itself

  const zoomed = () => chart && (chart.scales.x.min > 0 || chart.scales.x.max < ends[state.axis]);
  const redraw = () => {
    const { min, max } = chart.scales.x;
    chart.setData([xs, extended(D.memory)], false);
    chart.setScale("x", { min, max });
  };
  const build = () => {
    const area = $("chart"), width = area.clientWidth, narrow = width < 560;
    if (chart) chart.destroy();
    xs = [...(state.axis === "step" ? D.steps : D.starts), ends[state.axis]];
    for (let i = 1; i < xs.length; i++) if (xs[i] < xs[i - 1]) xs[i] = xs[i - 1];
    restack();
    chart = new uPlot({
      width,
      height: narrow ? 340 : 440,
      padding: [8, narrow ? 14 : 24, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: true, y: false } },
      scales: {
        x: { time: false, range: (u, min, max) => [min, max] },
        y: { range: () => [-LANES_SHARE * ceiling(), ceiling()] },
      },
      axes: [
        { stroke: ink("soft"), grid: { show: false }, ticks: { stroke: ink("rule") }, size: 34,
          font: "12px system-ui, sans-serif",
          values: (u, marks) => marks.map((m) => state.axis === "step" ? String(m) : timeTick(m)),
          space: narrow ? 60 : 80 },
        { stroke: ink("soft"), grid: { stroke: ink("rule"), width: 1 }, ticks: { show: false },
          size: 66, gap: 6, font: "12px system-ui, sans-serif", splits,
          values: (u, marks) => marks.map(tick) },
      ],
      series: [
        {},
        { stroke: () => ink("ink"), width: 1.25, points: { show: false }, paths: uPlot.paths.stepped({ align: 1 }) },
      ],
      hooks: {
        drawAxes: [drawStack],
        draw: [drawNames, drawLines, drawLanes],
        setCursor: [(u) => show(u.cursor.left >= 0 && u.cursor.idx !== null ? at(u) : null)],
        setScale: [() => { $("reset").hidden = !zoomed(); }],
      },
    }, [xs, extended(D.memory)], area);
    chart.over.addEventListener("touchmove", (event) => {
      const box = chart.over.getBoundingClientRect(), touch = event.touches[0];
      chart.setCursor({ left: touch.clientX - box.left, top: touch.clientY - box.top });
    }, { passive: true });
    show(null);
  };
  // The step under the pointer: a step reaches from its own start to the next one's.
  const at = (u) => {
    const x = u.posToVal(u.cursor.left, "x");
    let low = 0, high = count - 1;
    while (low < high) { const m = (low + high + 1) >> 1; if (xs[m] <= x) low = m; else high = m - 1; }
    return low;
  };
  const all = () => chart.setScale("x", { min: 0, max: ends[state.axis] });

  const pressed = (selector, button) => document.querySelectorAll(selector).forEach(
    (other) => other.setAttribute("aria-pressed", String(other === button)));
  document.querySelectorAll("[data-view]").forEach((button) => button.addEventListener("click", () => {
    state.view = Number(button.dataset.view);
    state.hidden.clear();
    pressed("[data-view]", button);
    legends();
    restack();
    redraw();
    show(state.at);
  }));
  document.querySelectorAll("[data-axis]").forEach((button) => button.addEventListener("click", () => {
    state.axis = button.dataset.axis;
    pressed("[data-axis]", button);
    build();
  }));
  $("reset").addEventListener("click", all);
  $("chart").addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const i = Math.min(count - 1, Math.max(0, (state.at ?? peakSample) + by));
    const x = (xs[i] + xs[i + 1]) / 2;
    chart.setCursor({ left: chart.valToPos(x, "x"), top: 10 }, false);
    show(i);
  });

  // ---- the trade-off

  const SVG = "http://www.w3.org/2000/svg";
  const svg = (tag, attributes, text) => {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const nice = (top, wanted) => {
    let each = 10 ** Math.floor(Math.log10(top / wanted));
    for (const m of [1, 2, 5, 10]) if (top / (each * m) <= wanted) { each *= m; break; }
    return each;
  };
  const curve = () => {
    const area = $("curve");
    if (!area || D.curve.length < 2) return;
    const width = area.clientWidth, narrow = width < 560, height = narrow ? 260 : 300;
    const pad = { left: 52, right: 16, top: 18, bottom: 40 };
    const extra = (c) => D.keepAllCost ? c / D.keepAllCost - 1 : 0;
    const peaks = [...D.curve.map((p) => p[0]), D.peak, ...(D.budget === null ? [] : [Math.min(D.budget, D.keepAllPeak)])];
    const right = Math.max(...peaks) * 1.03, left = Math.min(...peaks) * 0.94;
    // The last bytes may cost many times the step: such points stand at the upper edge.
    const most = Math.max(0.01, ...D.curve.map((p) => extra(p[1])), extra(D.cost));
    const top = Math.min(most, Math.max(0.5, 2.5 * extra(D.cost))) * 1.12;
    const segments = D.segments.filter((p) => p[0] >= left && p[0] <= right && extra(p[1]) <= top);
    const X = (v) => pad.left + ((v - left) / (right - left)) * (width - pad.left - pad.right);
    const Y = (v) => height - pad.bottom - (Math.min(v, top) / top) * (height - pad.top - pad.bottom);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": "Extra time against peak memory: schedules found, what is proven impossible, the chosen one" });
    const stripes = svg("pattern", { id: "stripes", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    stripes.append(svg("line", { x1: 0, x2: 0, y1: 0, y2: 7, class: "stripe" }));
    const defs = svg("defs", {});
    defs.append(stripes);
    root.append(defs);
    const stepY = nice(top, 4);
    for (let v = 0; v <= top + 1e-9; v += stepY) {
      root.append(svg("line", { x1: pad.left, x2: width - pad.right, y1: Y(v), y2: Y(v), class: "grid" }));
      root.append(svg("text", { x: pad.left - 8, y: Y(v) + 4, "text-anchor": "end" }, `+${+(100 * v).toFixed(2)} %`));
    }
    let stepX = 1;
    if (D.unit.size === "bytes") while ((right - left) / stepX > (narrow ? 4 : 8)) stepX *= 2;
    else stepX = nice(right - left, 6);
    for (let v = Math.ceil(left / stepX) * stepX; v <= right; v += stepX) {
      root.append(svg("text", { x: X(v), y: height - pad.bottom + 18, "text-anchor": "middle" }, tick(v)));
    }
    root.append(svg("text", { x: pad.left, y: 11 }, "extra time"));
    root.append(svg("text", { x: width - pad.right, y: height - 6, "text-anchor": "end" }, "peak memory"));
    // At each peak: the highest bound proven for that much memory or more.
    const proven = D.curve.filter((p) => p[2] !== null && extra(p[2]) > 0);
    if (proven.length) {
      const line = [];
      let before = left;
      const sorted = [...proven].sort((a, b) => a[0] - b[0]);
      sorted.forEach((p, k) => {
        const high = Math.max(...sorted.slice(k).map((q) => extra(q[2])));
        line.push([X(before), Y(high)], [X(p[0]), Y(high)]);
        before = p[0];
      });
      line.push([X(before), Y(0)]);
      const d = line.map((p, k) => `${k ? "L" : "M"}${p[0].toFixed(1)},${p[1].toFixed(1)}`).join("");
      root.append(svg("path", { d: `${d}L${X(left).toFixed(1)},${Y(0).toFixed(1)}Z`, class: "proven" }));
      root.append(svg("path", { d, class: "proven-edge" }));
      const room = Y(0) - Y(Math.max(...proven.map((p) => extra(p[2]))));
      if (room > 24) root.append(svg("text", { x: X(left) + 8, y: Y(0) - 8, class: "strong" }, "proven impossible"));
    }
    if (D.budget !== null && D.budget <= right) {
      root.append(svg("line", { x1: X(D.budget), x2: X(D.budget), y1: pad.top, y2: height - pad.bottom, class: "budget" }));
      const flip = X(D.budget) > width * 0.7;
      root.append(svg("text", { x: X(D.budget) + (flip ? -6 : 6), y: pad.top + 10, "text-anchor": flip ? "end" : "start" }, `budget ${size(D.budget)}`));
    }
    // A stair: what was found for less memory serves until the next point.
    const path = D.curve.map((p, k) => `${k ? "H" : "M"}${X(p[0]).toFixed(1)}${k ? "V" : ","}${Y(extra(p[1])).toFixed(1)}`).join("");
    root.append(svg("path", { d: path, class: "line" }));
    const tell = (dot, p, chosen, what) => {
      root.querySelectorAll(".on").forEach((other) => other.classList.remove("on"));
      dot.classList.add("on");
      const bound = p[2] === null || p[2] === undefined ? "" : `; no schedule in this much memory takes less than ${percent(extra(p[2]))}`;
      $("point").replaceChildren(el("b", {}, `${size(p[0])}: ${percent(extra(p[1]))} time`), `${bound}${chosen ? ". This is the plan" : ""}${what ? `. ${what}` : ""}.`);
    };
    for (const p of segments) {
      const square = svg("rect", { x: X(p[0]) - 4, y: Y(extra(p[1])) - 4, width: 8, height: 8, class: "segment", tabindex: 0,
        "aria-label": `in equal segments: ${size(p[0])}, ${percent(extra(p[1]))} time` });
      for (const event of ["mouseenter", "focus", "click"]) square.addEventListener(event, () => tell(square, p, false, "In equal segments of the model, all but their inputs computed again"));
      root.append(square);
    }
    if (segments.length) {
      const p = segments.reduce((a, b) => (a[1] > b[1] ? a : b)), flip = X(p[0]) > width * 0.6;
      root.append(svg("text", { x: X(p[0]) + (flip ? -9 : 9), y: Y(extra(p[1])) - 6, "text-anchor": flip ? "end" : "start" }, "equal segments"));
    }
    for (const p of D.curve) {
      const above = extra(p[1]) > top;
      if (above) root.append(svg("text", { x: X(p[0]) + 10, y: Y(top) + 18, class: "strong" }, `↑ ${percent(extra(p[1]))}`));
      const dot = svg("circle", { cx: X(p[0]), cy: Y(extra(p[1])), r: 5, class: "dot", tabindex: 0,
        "aria-label": `${size(p[0])}, ${percent(extra(p[1]))} time` });
      for (const event of ["mouseenter", "focus", "click"]) dot.addEventListener(event, () => tell(dot, p, false));
      root.append(dot);
    }
    const x = X(D.peak), y = Y(extra(D.cost));
    const chosen = svg("path", { d: `M${x},${y - 9}L${x + 9},${y}L${x},${y + 9}L${x - 9},${y}Z`, class: "chosen", tabindex: 0, "aria-label": "the plan" });
    const plan = [D.peak, D.cost, null];
    for (const event of ["mouseenter", "focus", "click"]) chosen.addEventListener(event, () => tell(chosen, plan, true));
    root.append(chosen);
    const flip = x > width * 0.75;
    root.append(svg("text", { x: x + (flip ? -14 : 14), y: y - 8, "text-anchor": flip ? "end" : "start", class: "strong" }, "this plan"));
    area.replaceChildren(root);
    tell(chosen, plan, true);
  };

  // ---- the table by module

  const table = document.querySelector(".tree tbody");
  const rows = [...table.rows];
  const parts = new Map();
  for (const row of rows) {
    const parent = row.dataset.parent;
    if (!parts.has(parent)) parts.set(parent, []);
    parts.get(parent).push(row);
  }
  const fold = (row) => row.querySelector(".fold");
  const unfold = (row, shown) => {
    for (const part of parts.get(row.dataset.id) || []) {
      part.hidden = !shown;
      if (fold(part)) unfold(part, shown && fold(part).getAttribute("aria-expanded") === "true");
    }
  };
  table.addEventListener("click", (event) => {
    const button = event.target.closest(".fold");
    if (!button) return;
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(open));
    unfold(button.closest("tr"), open);
  });
  document.querySelectorAll("[data-sort]").forEach((button) => button.addEventListener("click", () => {
    const key = button.dataset.sort, sign = key === "order" ? 1 : -1;
    pressed("[data-sort]", button);
    const place = (parent) => {
      const found = [...(parts.get(parent) || [])];
      found.sort((a, b) => sign * (a.dataset[key] - b.dataset[key]) || a.dataset.order - b.dataset.order);
      for (const row of found) { table.append(row); place(row.dataset.id); }
    };
    place("-1");
  }));

  if (innerWidth <= 720) {
    for (const row of rows) if (fold(row) && row.dataset.depth >= 2) fold(row).setAttribute("aria-expanded", "false");
    unfold(rows[0], true);
  }
  $("more")?.addEventListener("click", () => {
    document.querySelectorAll("#alive tr[hidden]").forEach((row) => { row.hidden = false; });
    $("more").parentElement.remove();
  });

  // ---- start, and follow the window and its colours

  const draw = () => { tiles.clear(); legends(); build(); curve(); };
  if (count) draw();
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; if (count) draw(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => count && draw());
})();
