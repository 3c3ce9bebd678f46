// What the picture answers: the readout of a step, the legends, axes, zoom and keys.

// ---- what a step says

const readout = (i) => {
  const step = D.steps[i], lane = D.laneNames[D.lane[i]];
  const kept = D.until[i] >= D.numSteps ? "to the end of the training step" : `until step ${D.until[i]}`;
  let fate = D.until[i] > step ? `Its result stays in memory ${kept}` : "Its result is freed at once";
  if (D.again[i] >= 0) fate += ` and is recomputed at step ${D.again[i]}`;
  $("readout").replaceChildren(
    el("b", {}, `Step ${step} of ${D.numSteps}: ${size(D.memory[i])}`), " ",
    el("span", { class: "lane" }, lane), " ",
    el("code", {}, D.texts[D.call[i]]), " in ", el("code", {}, D.texts[D.module[i]]),
    `. ${fate}. With everything saved: ${size(D.keepAll[i])} here.`,
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
