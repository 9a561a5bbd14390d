"use strict";
(() => {
  const tip = document.getElementById("tip");
  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 4)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
  };
  let anchor = null; // what the keyboard points at: its hint moves along when the page scrolls
  const hide = () => { tip.hidden = true; anchor = null; document.querySelectorAll(".on").forEach((mark) => mark.classList.remove("on")); };
  const showAt = (element, text) => {
    anchor = element;
    const box = element.getBoundingClientRect();
    show(text, box.left + box.width / 2, box.top + Math.min(box.height / 2, 60));
  };

  // Lines: each part has a title; as our own hint it comes at once and answers to the keyboard too.
  const parts = (chart) => {
    const hits = [...chart.querySelectorAll(".hit")];
    hits.forEach((hit) => { const title = hit.querySelector("title"); hit.dataset.tip = title.textContent; title.remove(); });
    const mark = (hit) => { hide(); hit.classList.add("on"); return hit.dataset.tip; };
    chart.addEventListener("pointermove", (event) => {
      const hit = event.target.closest(".hit");
      if (hit) show(mark(hit), event.clientX, event.clientY); else hide();
    });
    let at = -1;
    return (key) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[key];
      at = key === "Home" ? 0 : key === "End" ? hits.length - 1 : Math.max(0, Math.min(hits.length - 1, at + step));
      showAt(hits[at], mark(hits[at]));
    };
  };

  // Heat maps: the cell follows from the place.
  const cells = (chart) => {
    const { values, names, left, top, side } = chart.dataset;
    const rows = values.split(";").map((row) => row.split(","));
    const [rowNames, columnNames] = JSON.parse(names);
    const cursor = chart.querySelector(".cursor");
    const mark = (row, column) => {
      cursor.setAttribute("x", +left + column * side);
      cursor.setAttribute("y", +top + row * side);
      hide();
      cursor.classList.add("on");
      const value = rows[row][column];
      return rowNames[row] + "\n" + columnNames[column] + "\n" + (value === "" ? "no value" : value + " %");
    };
    chart.addEventListener("pointermove", (event) => {
      const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
      const row = Math.floor((place.y - top) / side), column = Math.floor((place.x - left) / side);
      if (rows[row] === undefined || rows[row][column] === undefined || rows[row][column] === "") hide();
      else show(mark(row, column), event.clientX, event.clientY);
    });
    let row = 0, column = 0;
    return (key) => {
      row = Math.max(0, Math.min(rows.length - 1, row + ({ ArrowDown: 1, ArrowUp: -1 }[key] || 0)));
      column = Math.max(0, Math.min(rows[0].length - 1, column + ({ ArrowRight: 1, ArrowLeft: -1 }[key] || 0)));
      if (key === "Home") row = column = 0;
      if (key === "End") { row = rows.length - 1; column = rows[0].length - 1; }
      const text = mark(row, column);
      showAt(cursor, text);
    };
  };

  const keys = ["ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown", "Home", "End"];
  for (const chart of document.querySelectorAll("svg.chart")) {
    const move = (chart.dataset.values === undefined ? parts : cells)(chart);
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", (event) => {
      if (event.key === "Escape") hide();
      if (!keys.includes(event.key)) return;
      event.preventDefault();
      move(event.key);
    });
  }
  addEventListener("scroll", () => { if (anchor) showAt(anchor, tip.textContent); else hide(); }, { passive: true });

  // Tables: a click on a heading sorts by it, a second one the other way round; what has no value comes last.
  for (const table of document.querySelectorAll("table.sortable")) {
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      heading.append(button);
      button.addEventListener("click", () => {
        const up = heading.getAttribute("aria-sort") !== "ascending";
        headings.forEach((other) => other.removeAttribute("aria-sort"));
        heading.setAttribute("aria-sort", up ? "ascending" : "descending");
        const text = (row) => row.cells[column].textContent.trim();
        const number = (row) => parseFloat(text(row).replace(/,/g, "").replace("−", "-"));
        const isText = heading.classList.contains("text");
        const compare = (a, b) => {
          if (isText) return (up ? 1 : -1) * text(a).localeCompare(text(b), "en", { numeric: true });
          const [x, y] = [number(a), number(b)];
          if (isNaN(x) || isNaN(y)) return isNaN(x) - isNaN(y);
          return (up ? 1 : -1) * (x - y);
        };
        table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
      });
    });
  }
})();
