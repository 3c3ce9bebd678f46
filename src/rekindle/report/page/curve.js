// The trade-off between memory and time.

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
      "aria-label": `checkpointing in equal segments: ${size(p[0])}, ${percent(extra(p[1]))} time` });
    for (const event of ["mouseenter", "focus", "click"]) square.addEventListener(event, () => tell(square, p, false, "Checkpointing in equal segments: only the input of each segment is saved"));
    root.append(square);
  }
  if (segments.length) {
    const p = segments.reduce((a, b) => (a[1] > b[1] ? a : b)), flip = X(p[0]) > width * 0.6;
    root.append(svg("text", { x: X(p[0]) + (flip ? -9 : 9), y: Y(extra(p[1])) - 6, "text-anchor": flip ? "end" : "start" }, "checkpointing in equal segments"));
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
