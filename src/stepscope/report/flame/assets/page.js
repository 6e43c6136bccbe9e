// The page around d3-flame-graph: chooses a tree, says what a box is worth, searches, zooms, and knows the keyboard.
// Every name of the data comes from files of others: it reaches the page through textContent alone.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const FOUND = "#ff5cf4";
  const CELL = 18;
  const byId = (id) => document.getElementById(id);
  const chartBox = byId("chart"), tip = byId("tip"), current = byId("current"), found = byId("found");
  const search = byId("search"), trees = byId("tree"), side = byId("side");
  const state = { tree: 0, inverted: true, base: false, chart: null, root: null, node: null, zoomed: null };

  const frameOf = (datum) => {
    const [name, file, line, kind] = data.frames[datum.f];
    return { name: data.names[name], file: data.files[file], line, kind: data.kinds[kind][0], label: data.kinds[kind][1], fill: data.kinds[kind][2] };
  };
  const placeOf = (frame) => (frame.file ? frame.file + (frame.line === null ? "" : ":" + frame.line) : "");
  const worth = (datum) => (state.base ? datum.b : datum.v);
  const number = (value) => {
    const size = Math.abs(value);
    const digits = size === 0 || size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : 3;
    return value.toLocaleString("en", { minimumFractionDigits: 0, maximumFractionDigits: digits });
  };
  const percent = (part, whole) => (whole > 0 ? ((100 * part) / whole).toFixed(part / whole < 0.1 ? 2 : 1) + " %" : "");
  // A box of yours says where it is; "<module>" and its like say nothing without a file.
  const labelOf = (datum) => {
    const frame = frameOf(datum), place = placeOf(frame).split("/").pop();
    return place && (frame.kind === "user" || frame.name.startsWith("<")) ? `${frame.name}  ${place}` : frame.name;
  };
  const tree = () => data.trees[state.tree];
  const differs = () => tree().base !== null;

  // Nodes stand parents first, so one pass over them makes the tree; nothing here recurses.
  const build = (from) => {
    const nodes = from.parent.map((_, at) => ({
      f: from.frame[at], v: from.value[at], b: from.base === null ? 0 : from.base[at],
      d: from.change === null ? 0 : from.change[at], c: [],
    }));
    from.parent.forEach((parent, at) => parent >= 0 && nodes[parent].c.push(nodes[at]));
    nodes.forEach((node) => node.c.length || delete node.c);
    return nodes[0];
  };

  const fill = (node) => {
    if (node.highlight) return FOUND;
    return differs() ? data.changes[node.data.d][1] : frameOf(node.data).fill;
  };

  const element = (tag, text, className) => {
    const made = document.createElement(tag);
    made.textContent = text;
    if (className) made.className = className;
    return made;
  };

  // What is known of a box: its name, its place, what it is worth.
  const describe = (into, node) => {
    const frame = frameOf(node.data), place = placeOf(frame), unit = tree().unit;
    const head = element("div", "");
    head.append(element("strong", frame.name), frame.label ? element("span", "  " + frame.label, "soft") : "");
    const lines = [head];
    if (place) lines.push(element("code", place));
    if (data.source[node.data.f]) lines.push(element("pre", data.source[node.data.f]));
    const inItself = (side) => node.data[side] - (node.data.c || []).reduce((sum, child) => sum + child[side], 0);
    const own = (value) => (Math.abs(value) < 1e-5 * larger(state.root) ? "0" : number(value));
    const rest = inItself(state.base ? "b" : "v");
    const figures = [`${number(worth(node.data))} ${unit}`, percent(worth(node.data), worth(state.root)) + " of the tree"];
    if (node.data.c && rest > 1e-5 * worth(node.data) && !differs()) figures.push(`${number(rest)} in itself`);
    if (differs()) {
      const { v, b } = node.data, sign = v > b ? "+" : "";
      figures.splice(0, 1, `${number(v)} ${unit} in ${data.sides[0]}, ${number(b)} in ${data.sides[1]}`);
      figures.push(`${data.changes[node.data.d][0]}: ${sign}${number(v - b)}`);
      if (node.data.c) figures.push(`in itself ${own(inItself("v"))} and ${own(inItself("b"))}`);
    }
    lines.push(element("div", figures.join(" · "), "soft"));
    into.replaceChildren(...lines);
  };

  const tooltip = () => undefined;  // the library calls it once with the picture
  tooltip.show = (event, node) => {
    describe(tip, node);
    tip.style.display = "block";
    const left = Math.min(event.pageX + 12, window.scrollX + document.documentElement.clientWidth - tip.offsetWidth - 8);
    const below = event.pageY + 16;
    const fits = below + tip.offsetHeight < window.scrollY + window.innerHeight;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (fits ? below : event.pageY - tip.offsetHeight - 10) + "px";
  };
  tooltip.hide = () => { tip.style.display = "none"; };
  tooltip.destroy = tooltip.hide;

  // ---------------------------------------------------------------------------------------------- searching
  const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const matcher = (text) => {
    const place = /^[^\s()|*+?^$[\]]+:\d+$/.test(text);  // file.py:42 means this line and not line 421
    let pattern;
    try {
      pattern = new RegExp(place ? `(^|/)${escaped(text)}$` : text, "i");
      search.removeAttribute("aria-invalid");
    } catch {
      pattern = new RegExp(escaped(text), "i");
      search.setAttribute("aria-invalid", "true");
    }
    const known = data.frames.map(([name, file, line]) => {
      const where = data.files[file] + (line === null ? "" : ":" + line);
      return place ? pattern.test(where) : pattern.test(data.names[name]) || pattern.test(where);
    });
    return (node) => node.parent !== null && known[node.data.f];
  };

  const runSearch = () => {
    const text = search.value.trim();
    if (!text) {
      search.removeAttribute("aria-invalid");
      found.textContent = "";
      state.chart.clear();
    } else {
      state.chart.setSearchMatch(matcher(text)).search(text);
    }
    mark();
  };

  const searched = (results, sum) => {
    const boxes = results.length === 1 ? "1 box" : `${results.length} boxes`;
    found.textContent = results.length
      ? `${boxes}, ${number(sum)} ${tree().unit}, ${percent(sum, worth(state.root))} of the tree`
      : "nothing matches";
  };

  // ---------------------------------------------------------------------------------------------- drawing
  const width = () => Math.max(320, chartBox.clientWidth);
  const rootNode = () => window.d3.select(chartBox.firstElementChild).datum();
  const larger = (datum) => Math.max(datum.v, datum.b);

  const draw = () => {
    const holder = document.createElement("div");
    chartBox.replaceChildren(holder);
    tooltip.hide();
    state.root = build(tree());
    state.chart = window.flamegraph.default()
      .width(width()).cellHeight(CELL).transitionDuration(0).minFrameSize(0.7).resetHeightOnZoom(true)
      .inverted(state.inverted).tooltip(tooltip)
      .sort((a, b) => larger(b.data) - larger(a.data))
      .getName((node) => labelOf(node.data))
      .getValue((item) => worth(item.data || item))
      .setLabelHandler(() => "")
      .setColorMapper(fill)
      .setSearchHandler(searched)
      .onClick((node) => { state.zoomed = node; choose(node); });
    window.d3.select(holder).datum(state.root).call(state.chart);
    state.zoomed = rootNode();
    choose(rootNode());
    byId("source").textContent = `${tree().unit}: ${tree().source}`;
    byId("hidden").textContent = tree().hidden > 0
      ? ` · ${number(tree().hidden)} ${tree().unit} in paths too thin to be drawn`
      : "";
    legend();
    if (search.value) runSearch();
  };

  const choose = (node) => {
    state.node = node;
    describe(current, node);
    mark();
  };

  // The library writes the class of every box anew whenever it draws.
  const mark = () => {
    window.d3.select(chartBox).selectAll("g.frame").classed("current", (node) => node === state.node && !!node.parent);
  };

  const refresh = () => {
    state.chart.width(width()).inverted(state.inverted).update();
    mark();
  };

  const zoom = (node) => {
    state.chart.zoomTo(node);
    mark();
  };

  const legend = () => {
    const used = new Set(tree().frame.map((frame) => data.frames[frame][3]));
    const entries = differs()
      ? data.legend.map((at) => data.changes[at])
      : data.kinds.filter(([, label], at) => label && used.has(at)).map(([, ...entry]) => entry);
    byId("legend").replaceChildren(...entries.map(([label, colour]) => {
      const entry = element("span", label), swatch = element("span", "", "swatch");
      swatch.style.backgroundColor = colour;
      entry.prepend(swatch);
      return entry;
    }));
  };

  // ---------------------------------------------------------------------------------------------- controls
  const setIcicle = (on) => {
    state.inverted = on;
    byId("icicle").setAttribute("aria-pressed", String(on));
    byId("flame").setAttribute("aria-pressed", String(!on));
    refresh();
    if (!on) chartBox.scrollIntoView({ block: "end" });
  };
  const setTheme = (dark) => { document.documentElement.dataset.theme = dark ? "dark" : "light"; };
  const isDark = () => document.documentElement.dataset.theme === "dark";
  const showTree = (at) => {
    state.tree = (at + data.trees.length) % data.trees.length;
    trees.value = String(state.tree);
    draw();
  };
  const copy = async () => {
    const frame = frameOf(state.node.data), text = placeOf(frame) || frame.name;
    try {
      await navigator.clipboard.writeText(text);
      byId("copied").textContent = "copied";
    } catch {
      const range = document.createRange();
      range.selectNodeContents(current.querySelector("code") || current);
      window.getSelection().removeAllRanges();
      window.getSelection().addRange(range);
      byId("copied").textContent = "selected; press Ctrl-C";
    }
    window.setTimeout(() => { byId("copied").textContent = ""; }, 2000);
  };
  const reset = () => {
    search.value = "";
    runSearch();
    state.chart.resetZoom();
    choose(rootNode());
  };

  const visible = (node) => node && worth(node.data) > 0;
  const children = (node) => (node.children || []).filter(visible);
  const siblings = (node) => (node.parent ? children(node.parent) : [node]);
  const step = (key) => {
    const node = state.node, row = siblings(node), at = row.indexOf(node);
    const [up, down] = state.inverted ? ["ArrowUp", "ArrowDown"] : ["ArrowDown", "ArrowUp"];
    const next = { [up]: node.parent, [down]: children(node)[0], ArrowLeft: row[at - 1], ArrowRight: row[at + 1] }[key];
    if (next) choose(next);
  };
  const KEYS = {
    "/": () => search.focus(), i: () => setIcicle(!state.inverted), d: () => setTheme(!isDark()),
    t: () => showTree(state.tree + 1), T: () => showTree(state.tree - 1), c: copy,
    Enter: () => zoom(state.node), Escape: reset,
  };
  const pressed = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target === search) {
      if (event.key === "Escape") { reset(); search.blur(); }
      return;
    }
    if (["SELECT", "BUTTON", "SUMMARY"].includes(event.target.tagName) && event.key !== "Escape") return;
    if (event.key.startsWith("Arrow")) step(event.key);
    else if (KEYS[event.key]) KEYS[event.key]();
    else return;
    event.preventDefault();
  };

  data.trees.forEach((each, at) => {
    const option = element("option", each.label);
    option.value = String(at);
    trees.append(option);
  });
  if (data.sides !== null) {
    data.sides.forEach((name, at) => {
      const option = element("option", "widths of " + name);
      option.value = String(at);
      side.append(option);
    });
    side.hidden = false;
  }
  trees.hidden = data.trees.length < 2;
  trees.addEventListener("change", () => showTree(Number(trees.value)));
  side.addEventListener("change", () => { state.base = side.value === "1"; draw(); });
  let waiting = 0;
  search.addEventListener("input", () => {
    window.clearTimeout(waiting);
    waiting = window.setTimeout(runSearch, 120);
  });
  search.addEventListener("search", runSearch);
  byId("icicle").addEventListener("click", () => setIcicle(true));
  byId("flame").addEventListener("click", () => setIcicle(false));
  byId("reset").addEventListener("click", reset);
  byId("copy").addEventListener("click", copy);
  byId("theme").addEventListener("click", () => setTheme(!isDark()));
  document.addEventListener("keydown", pressed);
  let resizing = 0;
  window.addEventListener("resize", () => {
    window.clearTimeout(resizing);
    resizing = window.setTimeout(refresh, 100);
  });
  setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches);
  showTree(data.first);
})();
