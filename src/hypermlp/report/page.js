// Click on a column's head to sort by it; without this the tables are as complete.
for (const table of document.querySelectorAll("table.sorts")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, i) => {
    head.classList.add("sortable");
    head.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") !== "descending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => row.cells[i].dataset.v;
      const rows = [...table.tBodies[0].rows].sort((a, b) => {
        const x = value(a), y = value(b);
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return down ? -order : order;
      });
      table.tBodies[0].append(...rows);
    });
  });
}
// A table that is wider than its place fades at the side where it continues, and a hint says so.
for (const box of document.querySelectorAll(".scroll")) {
  const hint = box.previousElementSibling?.classList.contains("hint") ? box.previousElementSibling : null;
  const look = () => {
    box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
    hint?.classList.toggle("more", box.clientWidth < box.scrollWidth - 2);
    hint?.classList.toggle("all", box.clientWidth >= box.scrollWidth - 2);
  };
  box.addEventListener("scroll", look, { passive: true });
  window.addEventListener("resize", look);
  look();
}
