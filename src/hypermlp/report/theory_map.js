// Lines between the statements of the map: all of them faintly where threads lie side by side, one statement's own on pointing.
const map = document.querySelector(".map");
const sheet = map.querySelector("svg");
const nodes = new Map([...map.querySelectorAll("[data-number]")].map((n) => [n.dataset.number, n]));
let chosen = null;

function line(from, to, own) {
  const origin = map.getBoundingClientRect();
  const [a, b] = [from, to].map((n) => n.getBoundingClientRect());
  const x = (r, other) => (r.left < other.left - 40 ? r.right : r.left) - origin.left;
  const y = (r) => (r.top + r.bottom) / 2 - origin.top;
  const [x1, y1, x2, y2] = [x(a, b), y(a), x(b, a), y(b)];
  // Within a thread the line runs through the margin, the further out the longer it is.
  const bend = Math.abs(a.left - b.left) < 40 ? Math.min(x1, x2) - Math.min(26, 6 + Math.abs(y1 - y2) / 12) : (x1 + x2) / 2;
  return `<path${own ? ' class="own"' : ""} d="M${x1} ${y1}C${bend} ${y1} ${bend} ${y2} ${x2} ${y2}"/>`;
}

function draw() {
  const lines = [];
  for (const node of nodes.values()) node.classList.remove("near");
  for (const node of nodes.values()) {
    for (const number of node.dataset.cites.split("|").filter((n) => nodes.has(n))) {
      const other = nodes.get(number);
      const own = chosen === node || chosen === other;
      if (own) (chosen === node ? other : node).classList.add("near");
      if (own || innerWidth >= 1000) lines.push(line(node, other, own));
    }
  }
  sheet.innerHTML = lines.join("");
}

for (const node of nodes.values()) {
  for (const event of ["pointerenter", "focus"]) node.addEventListener(event, () => { chosen = node; draw(); });
  for (const event of ["pointerleave", "blur"]) node.addEventListener(event, () => { chosen = null; draw(); });
}
addEventListener("resize", draw);
draw();
