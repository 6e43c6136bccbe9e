// Zoom and search for a flame graph that is one SVG file. Without a script the picture stands as it was drawn.
"use strict";
(() => {
  const svg = document.querySelector("svg"), WIDTH = Number(svg.dataset.width), LETTER = 6.6;
  const boxes = [...svg.querySelectorAll("g.box")].map((g) => ({
    g, x: Number(g.dataset.x), w: Number(g.dataset.w), depth: Number(g.dataset.d), name: g.dataset.n,
    rect: g.querySelector("rect"), text: g.querySelector("text"), title: g.querySelector("title").textContent,
  }));
  const status = svg.getElementById("status"), root = boxes[0];
  const fit = (name, width) => {
    const letters = Math.floor((width - 6) / LETTER);
    return letters < 3 ? "" : name.length <= letters ? name : name.slice(0, letters - 1) + "…";
  };
  const zoom = (to) => {
    const scale = WIDTH / to.w, end = to.x + to.w, slack = 1e-6;
    for (const box of boxes) {
      const above = box.depth < to.depth && box.x <= to.x + slack && box.x + box.w >= end - slack;
      const inside = box.x >= to.x - slack && box.x + box.w <= end + slack && box.depth >= to.depth;
      const width = above ? WIDTH : box.w * scale, left = above ? 0 : (box.x - to.x) * scale;
      box.g.style.display = above || inside ? "" : "none";
      box.g.style.opacity = above ? "0.6" : "";
      box.rect.setAttribute("x", left);
      box.rect.setAttribute("width", Math.max(0, width - 0.5));
      box.text.setAttribute("x", left + 3);
      box.text.textContent = fit(box.name, width);
    }
  };
  const find = (text) => {
    let pattern = null;
    try {
      pattern = text ? new RegExp(text, "i") : null;
    } catch {
      pattern = new RegExp(text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "i");
    }
    let covered = 0, until = -1, count = 0;
    const hits = boxes.filter((box) => {
      const hit = pattern !== null && box !== root && pattern.test(box.title.split("\n").slice(0, 2).join("\n"));
      box.rect.setAttribute("fill", hit ? "#ff5cf4" : box.rect.dataset.fill);
      return hit;
    });
    for (const hit of hits.sort((a, b) => a.x - b.x || a.depth - b.depth)) {
      count += 1;
      if (hit.x + hit.w > until + 1e-6) {
        covered += hit.x + hit.w - Math.max(hit.x, until);
        until = hit.x + hit.w;
      }
    }
    status.textContent = pattern === null ? "" : `${count} matched, ${((100 * covered) / root.w).toFixed(1)} % of the tree`;
  };
  boxes.forEach((box) => box.g.addEventListener("click", () => zoom(box)));
  svg.getElementById("reset").addEventListener("click", () => { zoom(root); find(""); });
  svg.getElementById("search").addEventListener("click", () => find(window.prompt("function, file or regular expression") || ""));
})();
