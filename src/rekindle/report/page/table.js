// The table by module, what starts hidden, and the start of everything.

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
