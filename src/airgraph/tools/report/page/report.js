"use strict";
// The report's page. Everything that comes from a program goes through textContent, never through markup.
const data = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
const svgSpace = "http://www.w3.org/2000/svg";
const state = { tab: "Overview", graph: 0, open: new Set(), search: "", more: null };

function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(svgSpace, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
function table(head, rows, numbers = []) {
  const cells = (row, tag) => row.map((c, i) => el(tag, numbers.includes(i) ? { class: "number" } : {}, String(c ?? "")));
  return el("table", {}, el("tr", {}, ...cells(head, "th")), ...rows.map((row) => el("tr", {}, ...cells(row, "td"))));
}
const bytes = (n) => (n < 1e3 ? `${n} B` : n < 1e6 ? `${(n / 1e3).toFixed(1)} kB` : `${(n / 1e6).toFixed(1)} MB`);
const place = (p) => (p ? `${p.file}:${p.line}` : "");

function cached(told) {  // whether the program was in the compilation cache, else how much object code was
  const notes = data.graphs.filter((g) => g.name === told.name).flatMap((g) => g.passes).flatMap((p) => p.notes);
  return [told.cache, ...notes.filter((n) => n.startsWith("cache: ")).map((n) => n.slice(7))].filter(Boolean).join("; ");
}

// -- overview ---------------------------------------------------------------------------------------------------------
function overview() {
  const o = data.overview, page = [];
  page.push(el("p", {}, data.text.split("\n")[0].replace(/^airgraph: /, "")));
  const total = Object.values(o.seconds).reduce((a, b) => a + b, 0);
  if (total) {
    const colours = ["input", "product", "pointwise", "reduction", "call", "move"];
    const parts = Object.entries(o.seconds).map(([name, s], i) =>
      el("span", { style: `width:${(100 * s) / total}%;background:var(--${colours[i % 6]})`, title: `${name} ${s.toFixed(3)} s` }, name));
    page.push(el("h2", {}, `Compile time: ${total.toFixed(2)} s`), el("div", { class: "bar" }, ...parts));
    page.push(el("p", { class: "legend" }, Object.entries(o.seconds).map(([n, s]) => `${n} ${s.toFixed(3)} s`).join("  ·  ")));
  }
  page.push(el("h2", {}, "Graphs"), table(["name", "phase", "kind", "ops", "by PyTorch", "ms", "cache", "function", "where"], o.graphs.map((g) => [
    g.name, g.phase, g.classification, g.converted + g.fallbacks, g.fallbacks,
    (1e3 * Object.values(g.stages).reduce((a, b) => a + b, 0)).toFixed(0), cached(g), g.function, place(g.place)]), [3, 4, 5]));
  if (o.breaks.length) page.push(el("h2", {}, "Graph breaks"), table(["where", "reason", "try"], o.breaks.map((b) => [place(b.place), b.reason, b.hints[0]])));
  if (o.recompiles.length) page.push(el("h2", {}, "Recompiles"), table(["function", "called from", "failed guard"],
    o.recompiles.map((r) => [r.function, place(r.caller), r.guards.map((g) => g.text).join("; ")])));
  const elsewhere = o.ops.filter((op) => op.by === "pytorch");
  if (elsewhere.length) page.push(el("h2", {}, "Ops that PyTorch runs"), table(["op", "count", "why", "where"], elsewhere.map((op) => [op.target, op.count, op.reason, op.places.map(place).join(", ")]), [1]));
  if (data.kernels.length) page.push(el("h2", {}, "Kernels by time"), table(["kernel", "calls", "ms", "line"],
    data.kernels.map((k) => [k.name, k.calls, (k.seconds * 1e3).toFixed(3), k.source]), [1, 2]));
  return page;
}

// -- stages: selecting a line marks the lines of the same FX nodes everywhere -------------------------------------------
const BLOCK = 100, LINE = 18.6;  // lines that the browser lays out together when they come near the screen; height of one
function stages(graph) {
  const panes = el("div", { class: "panes" });
  for (const stage of graph.stages) {
    const lines = el("div", { class: "lines", "data-stage": stage.name });
    for (let i = 0; i < stage.lines.length; i += BLOCK) {
      const made = stage.lines.slice(i, i + BLOCK).map(([text, notes]) => el("div", notes.length ? { "data-n": notes.join(" ") } : {}, text || " "));
      lines.append(el("div", { class: "block", style: `contain-intrinsic-height:${made.length * LINE}px` }, ...made));
    }
    panes.append(el("div", { class: "pane" }, el("h3", {}, stage.name), lines));
  }
  panes.addEventListener("click", (event) => {
    const line = event.target.closest("[data-n]");
    if (line) select(panes, new Set(line.dataset.n.split(" ")), line);
  });
  return [panes];
}
function select(panes, notes, clicked) {
  for (const line of panes.querySelectorAll(".on")) line.classList.remove("on");
  for (const pane of panes.querySelectorAll(".lines")) {
    const hits = [...pane.querySelectorAll("[data-n]")].filter((l) => l.dataset.n.split(" ").some((n) => notes.has(n)));
    for (const line of hits) line.classList.add("on");
    if (hits.length && !hits.includes(clicked))
      pane.scrollTop += hits[0].getBoundingClientRect().top - pane.getBoundingClientRect().top - pane.clientHeight / 3;
  }
}

// -- drawing: a tree of modules, folded; only what is open is laid out and drawn ---------------------------------------
const KINDS = [[/^(Data|Const|NetOutput)/, "input"], [/MatMul|Conv|Attention|Einsum/, "product"], [/^AtenCall/, "call"],
  [/Reduce|Softmax|Norm|Arg|Sum|Mean|TopK|Cum/, "reduction"], [/Transpose|Reshape|Slice|Concat|Pack|Gather|Scatter|Pad|Cast|Expand|Squeeze|Identity|Broadcast|Tile/, "move"]];
const kindOf = (op) => (KINDS.find(([pattern]) => pattern.test(op)) || [0, "pointwise"])[1];
const CHUNK = 60;  // nodes of one group that are drawn at once

function tree(graph) {
  if (graph.tree) return graph.tree;
  const root = { path: "", children: new Map(), nodes: [], parent: null };
  graph.nodes.forEach((node, id) => {
    let group = root;
    for (const part of node.module ? node.module.split(".") : []) {
      const path = group.path ? `${group.path}.${part}` : part;
      if (!group.children.has(part)) group.children.set(part, { path, children: new Map(), nodes: [], parent: group });
      group = group.children.get(part);
    }
    group.nodes.push(id);
  });
  const split = (group) => {  // long lists of nodes become groups of their own
    for (const child of [...group.children.values()]) split(child);
    if (group.nodes.length > CHUNK) {
      const nodes = group.nodes;
      group.nodes = [];
      for (let i = 0; i < nodes.length; i += CHUNK) {
        const path = `${group.path}#${i + 1}–${Math.min(i + CHUNK, nodes.length)}`;
        group.children.set(path, { path, children: new Map(), nodes: nodes.slice(i, i + CHUNK), parent: group });
      }
    }
    // and long lists of groups one level more
    if (group.children.size > CHUNK) {
      const children = [...group.children.entries()];
      group.children = new Map();
      for (let i = 0; i < children.length; i += CHUNK) {
        const path = `${group.path}##${i + 1}–${Math.min(i + CHUNK, children.length)}`;
        const made = { path, children: new Map(children.slice(i, i + CHUNK)), nodes: [], parent: group };
        for (const child of made.children.values()) child.parent = made;
        group.children.set(path, made);
      }
    }
  };
  split(root);
  graph.owner = new Array(graph.nodes.length);
  const own = (group) => {
    group.count = group.nodes.length;
    for (const id of group.nodes) graph.owner[id] = group;
    for (const child of group.children.values()) { own(child); group.count += child.count; }
  };
  own(root);
  return (graph.tree = root);
}
const keyOf = (group) => `g${group.path}`;
const isOpen = (group) => !group.parent || state.open.has(group.path);
function visible(graph, id) {  // the outermost closed group a node is in, or the node itself
  let shown = `n${id}`;
  for (let group = graph.owner[id]; group.parent; group = group.parent) if (!isOpen(group)) shown = keyOf(group);
  return shown;
}
function drawing(graph) {
  const root = tree(graph);
  if (!state.open.size && root.count <= CHUNK) openAll(root);
  const search = el("input", { type: "search", placeholder: "search ops, names, modules", id: "search", value: state.search });
  const fold = el("button", { id: "fold" }, "fold all");
  const found = el("span", { class: "legend", id: "found" });
  const picture = svg("svg", { id: "drawing" });
  const show = () => { draw(graph, picture); mark(graph, picture, found); };
  search.addEventListener("input", () => { Object.assign(state, { search: search.value, more: null }); mark(graph, picture, found); prepare(graph); });
  search.addEventListener("keydown", (event) => { if (event.key === "Enter") reveal(graph, show); });
  fold.addEventListener("click", () => { state.open.clear(); state.more = null; show(); });
  const legend = el("span", { class: "legend" }, "click a module to unfold it, its frame or one of its nodes to fold it; Enter opens what was found");
  queueMicrotask(show);
  return [el("div", { class: "tools" }, search, fold, found, legend), picture];
}
function openAll(group) {
  for (const child of group.children.values()) { state.open.add(child.path); openAll(child); }
}
const hits = (graph) => {
  const word = state.search.toLowerCase();
  return word ? graph.nodes.map((n, id) => id).filter((id) => {
    const n = graph.nodes[id];
    return `${n.op} ${n.name} ${n.module}`.toLowerCase().includes(word);
  }) : [];
};
function withHits(graph) {  // the modules of the first hits, as many as can be drawn at once
  const found = new Set();
  let room = CHUNK;
  for (const id of hits(graph)) {
    const around = [];
    for (let g = graph.owner[id]; g.parent; g = g.parent) around.unshift(g);
    for (const g of around) {
      if (!found.has(g) && !isOpen(g)) room -= g.nodes.length + g.children.size;
      found.add(g);
    }
    if (room < 0) break;
  }
  return found;
}
const whenIdle = window.requestIdleCallback ?? setTimeout;
function reveal(graph, show) {  // unfolds for 20 ms, draws, and goes on in idle time until something else is asked for
  const closed = [...withHits(graph)].filter((group) => !isOpen(group));
  const some = () => {
    const end = performance.now() + 20;
    do {
      const group = closed.shift();
      folded(graph, group);
      state.open.add(group.path);
    } while (closed.length && performance.now() < end);
    show();
    state.more = closed.length ? some : null;
    whenIdle(() => { if (state.more === some) some(); });
  };
  if (closed.length) some();
}
function mark(graph, picture, found) {
  const list = hits(graph), boxes = new Set(list.map((id) => visible(graph, id)));
  for (const box of picture.querySelectorAll("g.box")) box.classList.toggle("found", boxes.has(box.dataset.key));
  found.textContent = state.search ? `${list.length} found` : `${graph.nodes.length} nodes`;
}
// A group is laid out by itself, once, with its groups folded: unfolding one lays out its inside only, and makes room for
// it around its box. An edge belongs to the innermost group that both its ends are in; on its way there it goes through
// the points "in" and "out" of the groups between.
function links(graph) {
  if (graph.links) return;
  const chain = (id) => { const groups = []; for (let g = graph.owner[id]; g; g = g.parent) groups.unshift(g); return groups; };
  const all = (group) => { Object.assign(group, { links: [], edges: new Set() }); for (const child of group.children.values()) all(child); };
  all(tree(graph));
  graph.nodes.forEach((node, to) => {
    const below = chain(to);
    for (const [from, type] of node.in) {
      const above = chain(from);
      let depth = 0;
      while (above[depth + 1] && above[depth + 1] === below[depth + 1]) depth += 1;
      const keys = (groups, id) => [...groups.slice(depth + 1).map(keyOf), `n${id}`];
      const out = keys(above, from), into = keys(below, to);
      above[depth].links.push({ from, to, type, above: above.slice(depth + 1), below: below.slice(depth + 1) });
      above[depth].edges.add(`${out[0]}\n${into[0]}`);
      out.slice(1).forEach((key, i) => above[depth + 1 + i].edges.add(`${key}\nout`));
      into.slice(1).forEach((key, i) => below[depth + 1 + i].edges.add(`in\n${key}`));
    }
  });
  graph.links = true;
}
function boxesOf(graph, group) {
  const box = (key, title, under, rest) => ({ key, title, under, width: 7 * Math.max(title.length, under.length, 8) + 16, height: 34, ...rest });
  return [...[...group.children.values()].map((g) => box(keyOf(g), g.path, `${g.count} nodes`, { group: g, kind: "group", first: firstNode(g) })),
    ...group.nodes.map((id) => box(`n${id}`, graph.nodes[id].op, graph.nodes[id].name, { kind: kindOf(graph.nodes[id].op), first: id }))].sort((a, b) => a.first - b.first);
}
const firstNode = (group) => Math.min(...group.nodes.slice(0, 1), ...[...group.children.values()].map(firstNode));
function folded(graph, group) {
  graph.layouts ??= new Map();
  if (!graph.layouts.has(group)) graph.layouts.set(group, laidOut(graph, group));
  return graph.layouts.get(group);
}
const next = (graph) => [...withHits(graph), ...graph.shown].find((group) => !graph.layouts.has(group));
function prepare(graph) {  // in idle time: the insides of what may be unfolded next
  whenIdle(() => {
    const group = next(graph);
    if (group) { folded(graph, group); prepare(graph); }
  });
}
function laidOut(graph, group) {
  links(graph);
  const plan = new dagre.graphlib.Graph(), boxes = boxesOf(graph, group);
  plan.setGraph({ nodesep: 18, ranksep: 28, rankdir: "TB" });
  plan.setDefaultEdgeLabel(() => ({}));
  for (const box of boxes) plan.setNode(box.key, { width: box.width, height: box.height });
  for (const edge of group.edges) {
    const [from, to] = edge.split("\n");
    if (from === "in" || to === "out") plan.setNode(from === "in" ? from : to, { width: 8, height: 0 });
    plan.setEdge(from, to);
  }
  dagre.layout(plan);
  const routes = new Map(plan.edges().map((e) => [`${e.v}\n${e.w}`, plan.edge(e).points]));
  const at = (key) => (plan.hasNode(key) ? plan.node(key) : null);
  return { boxes: boxes.map((box) => ({ ...box, ...at(box.key) })), routes, ports: { in: at("in"), out: at("out") }, width: plan.graph().width, height: plan.graph().height };
}
const PAD = 14, TITLE = 22;
function unfolded(graph, group) {  // the layout with room for the open groups: their rows become higher, and what is beside them moves away
  const base = folded(graph, group), inner = new Map(), rows = new Map();
  for (const box of base.boxes) {
    if (!box.group || !isOpen(box.group)) continue;
    const inside = unfolded(graph, box.group);
    const size = { inside, width: Math.max(inside.width + 2 * PAD, box.width), height: inside.height + TITLE + PAD };
    inner.set(box.key, size);
    const row = rows.get(box.y) ?? { y: box.y, height: 34, more: 0, wider: [] };
    row.more = Math.max(row.more, size.height - row.height);
    row.wider.push({ x: box.x, more: Math.max(0, size.width - box.width) / 2 });
    rows.set(box.y, row);
  }
  if (!inner.size) return { ...base, inner };
  const all = [...rows.values()];
  const downBy = (y) => all.reduce((sum, r) => sum + r.more * Math.min(1, Math.max(0, (y - r.y) / r.height + 0.5)), 0);
  const rowAt = (y) => all.find((r) => Math.abs(y - r.y) < r.height / 2 - 1);
  const asideBy = (row, x) => row.wider.reduce((sum, c) => sum + Math.sign(x - c.x) * c.more, 0);
  const moved = (p) => { const row = rowAt(p.y); return { x: p.x + (row ? asideBy(row, p.x) : 0), y: p.y + downBy(p.y) }; };
  const boxes = base.boxes.map((box) => ({ ...box, ...moved(box), ...(inner.has(box.key) ? { width: inner.get(box.key).width, height: inner.get(box.key).height } : {}) }));
  const byKey = new Map(boxes.map((box) => [box.key, box]));
  const routes = new Map();
  for (const [name, points] of base.routes) {
    const [from, to] = name.split("\n").map((key) => byKey.get(key));
    const route = points.flatMap((p, i) => {  // beside an open group: straight down its whole height
      const row = i && i < points.length - 1 && rowAt(p.y), at = moved(p);
      return row ? [{ x: at.x, y: row.y - row.height / 2 + downBy(row.y - row.height / 2) }, { x: at.x, y: row.y + row.height / 2 + downBy(row.y + row.height / 2) }] : [at];
    });
    const within = (p, box, side) => ({ x: Math.min(Math.max(p.x, box.x - box.width / 2), box.x + box.width / 2), y: box.y + (side * box.height) / 2 });
    if (from) route[0] = within(route[0], from, 1);
    if (to) route[route.length - 1] = within(route[route.length - 1], to, -1);
    routes.set(name, route);
  }
  const ports = { in: base.ports.in && { ...base.ports.in, ...moved(base.ports.in) }, out: base.ports.out && { ...base.ports.out, ...moved(base.ports.out) } };
  const xs = [...boxes.flatMap((b) => [b.x - b.width / 2, b.x + b.width / 2]), ...[...routes.values()].flat().map((p) => p.x)];
  const left = Math.min(...xs), shift = (p) => ({ ...p, x: p.x - left });
  return { inner, boxes: boxes.map(shift), routes: new Map([...routes].map(([name, points]) => [name, points.map(shift)])),
    ports: { in: ports.in && shift(ports.in), out: ports.out && shift(ports.out) }, width: Math.max(...xs) - left, height: base.height + all.reduce((sum, r) => sum + r.more, 0) };
}
function placed(graph) {  // boxes, frames of open groups, and edges with the points they go through
  const found = { boxes: [], frames: [], edges: new Map() }, at = new Map();
  const put = (group, layout, x, y) => {
    at.set(group, { layout, x, y });
    for (const box of layout.boxes) {
      const there = { ...box, x: box.x + x, y: box.y + y }, size = layout.inner.get(box.key);
      (size ? found.frames : found.boxes).push(there);
      if (size) put(box.group, size.inside, there.x - size.inside.width / 2, there.y - there.height / 2 + TITLE);
    }
    found.edges.set(group, []);
  };
  const whole = unfolded(graph, tree(graph));
  put(tree(graph), whole, 0, 0);
  const route = (group, from, to) => { const { layout, x, y } = at.get(group); return layout.routes.get(`${from}\n${to}`).map((p) => ({ x: p.x + x, y: p.y + y })); };
  const edges = new Map();
  for (const group of at.keys()) {
    for (const { from, to, type, above, below } of group.links) {
      const a = visible(graph, from), b = visible(graph, to);
      if (edges.has(`${a}\n${b}`)) continue;
      const steps = (groups, id) => [...groups.map(keyOf), `n${id}`];
      const out = steps(above, from), into = steps(below, to);
      const points = route(group, out[0], into[0]), middle = points[Math.floor(points.length / 2)];
      for (let i = 0; i < above.length && at.has(above[i]); i += 1) points.unshift(...route(above[i], out[i + 1], "out"));
      for (let i = 0; i < below.length && at.has(below[i]); i += 1) points.push(...route(below[i], "in", into[i + 1]));
      edges.set(`${a}\n${b}`, { points, type, middle });
    }
  }
  return { boxes: found.boxes, frames: found.frames, edges: [...edges.values()], width: whole.width };
}
function draw(graph, picture) {
  const { boxes, frames, edges, width: across } = placed(graph);
  graph.shown = boxes.filter((box) => box.group).map((box) => box.group);
  prepare(graph);
  const layer = svg("g");
  const boxed = (box, kind, ...texts) => svg("g", { class: kind, "data-key": box.key, transform: `translate(${box.x - box.width / 2},${box.y - box.height / 2})` },
    svg("rect", { width: box.width, height: box.height, rx: 6 }), ...texts);
  for (const frame of frames) layer.append(boxed(frame, "frame", svg("text", { class: "type", x: 8, y: 14 }, frame.title)));
  for (const { points, type, middle } of edges) {
    layer.append(svg("path", { d: "M" + points.map((p) => `${p.x},${p.y}`).join("L"), "marker-end": "url(#arrow)" }));
    layer.append(svg("text", { class: "type", x: middle.x + 3, y: middle.y }, type));
  }
  for (const box of boxes)
    layer.append(boxed(box, `box ${box.group ? "group" : ""} kind-${box.kind}`, svg("text", { x: 8, y: 14 }, box.title), svg("text", { class: "type", x: 8, y: 27 }, box.under)));
  const arrow = svg("marker", { id: "arrow", viewBox: "0 0 6 6", refX: 6, refY: 3, markerWidth: 6, markerHeight: 6, orient: "auto" }, svg("path", { d: "M0,0L6,3L0,6z" }));
  picture.replaceChildren(svg("defs", {}, arrow), layer);
  const width = picture.clientWidth || 800, height = picture.clientHeight || 600;
  const view = { y: -10, w: Math.max(across + 20, 0.7 * width) };
  view.x = (across - view.w) / 2;
  if (view.w > 1.6 * width) {  // too wide to be read at once: begin where the graph does
    view.w = 1.6 * width;
    view.x = boxes[0].x - view.w / 2;
  }
  const show = () => picture.setAttribute("viewBox", `${view.x} ${view.y} ${view.w} ${(view.w * height) / width}`);
  show();
  picture.onwheel = (event) => {
    event.preventDefault();
    const factor = event.deltaY > 0 ? 1.15 : 1 / 1.15, x = event.offsetX / width, y = event.offsetY / height;
    view.x += view.w * (1 - factor) * x;
    view.y += ((view.w * height) / width) * (1 - factor) * y;
    view.w *= factor;
    show();
  };
  let moved = 0;
  picture.onpointerdown = () => { moved = 0; };
  picture.onpointermove = (event) => {
    if (!event.buttons) return;
    moved += Math.abs(event.movementX) + Math.abs(event.movementY);
    view.x -= (event.movementX * view.w) / width;
    view.y -= (event.movementY * view.w) / width;
    show();
  };
  picture.onclick = (event) => {
    const box = event.target.closest("g.box, g.frame");
    if (!box || moved > 4) return;
    state.more = null;
    const key = box.dataset.key;
    if (box.classList.contains("frame")) state.open.delete(key.slice(1));
    else if (key[0] === "g") state.open.add(key.slice(1));
    else if (graph.owner[+key.slice(1)].parent) state.open.delete(graph.owner[+key.slice(1)].path);
    else return;
    draw(graph, picture);
    mark(graph, picture, document.getElementById("found"));
  };
}

// -- memory -----------------------------------------------------------------------------------------------------------
function memory(graph) {
  const arena = graph.arena;
  if (!arena) return [el("p", {}, "No arena: this graph has no plan of ours, has not run, or needs no intermediates.")];
  const width = 1000, height = 380, x = width / arena.steps, y = height / arena.bytes;
  const picture = svg("svg", { id: "arena", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none" });
  const alive = el("div", { id: "alive" });
  for (const t of arena.tensors) {
    const label = `${t.type.replace("DT_", "").toLowerCase()}[${t.shape.join(", ")}] ${bytes(t.bytes)} at ${t.offset}, steps ${t.first} to ${t.last}`;
    picture.append(svg("rect", { x: t.first * x, y: height - (t.offset + t.bytes) * y, width: (t.last - t.first + 1) * x, height: Math.max(t.bytes * y, 1) }, svg("title", {}, label)));
  }
  const at = svg("line", { y1: 0, y2: height, x1: -1, x2: -1 });
  picture.append(at);
  const show = (step) => {
    at.setAttribute("x1", (step + 0.5) * x);
    at.setAttribute("x2", (step + 0.5) * x);
    const living = arena.tensors.filter((t) => t.first <= step && step <= t.last);
    [...picture.querySelectorAll("rect")].forEach((r, i) => r.classList.toggle("on", living.includes(arena.tensors[i])));
    alive.replaceChildren(el("h2", {}, `Step ${step}: ${living.length} ${living.length === 1 ? "tensor" : "tensors"} alive, ${bytes(living.reduce((a, t) => a + t.bytes, 0))}`),
      table(["type", "shape", "bytes", "offset", "from step", "to step"], living.map((t) => [t.type, `[${t.shape.join(", ")}]`, t.bytes, t.offset, t.first, t.last]), [2, 3, 4, 5]));
  };
  picture.addEventListener("click", (event) => show(Math.min(arena.steps - 1, Math.floor((event.offsetX / picture.clientWidth) * arena.steps))));
  queueMicrotask(() => show(0));
  return [el("p", {}, `${arena.tensors.length} intermediates in ${bytes(arena.bytes)}` + (arena.lent ? `, ${arena.lent} more in the memory of results` : "") + `; steps from left to right, offsets from bottom to top. Select a step.`), picture, alive];
}

// -- flame: the time of kernels by module path; a box is as wide as its share ------------------------------------------
function timeTree() {
  const branch = (name, parent) => ({ name, parent, seconds: 0, calls: 0, source: "", children: new Map() });
  const root = branch("all kernels", null);
  for (const kernel of data.kernels) {
    let at = root;
    at.seconds += kernel.seconds;
    for (const part of [...(kernel.module ? kernel.module.split(".") : []), kernel.name]) {
      if (!at.children.has(part)) at.children.set(part, branch(part, at));
      at = at.children.get(part);
      at.seconds += kernel.seconds;
    }
    at.calls += kernel.calls;
    at.source = kernel.source;
  }
  return root;
}
const depthOf = (box) => 1 + Math.max(0, ...[...box.children.values()].map(depthOf));
function flame() {
  const picture = svg("svg", { id: "flame" }), all = timeTree(), width = 1000, row = 22;
  const show = (top) => {
    const put = (box, x, y) => {
      const w = (box.seconds / top.seconds) * width;
      if (w < 0.5) return;
      const share = `${(1e3 * box.seconds).toFixed(3)} ms, ${((100 * box.seconds) / all.seconds).toFixed(1)} %`;
      const label = `${box.name}: ${share}` + (box.calls ? `, ${box.calls} calls  ${box.source}` : "");
      const made = svg("g", { class: `kind-${box.children.size ? "module" : kindOf(box.name)}` }, svg("title", {}, label),
        svg("rect", { x, y, width: w, height: row - 2, rx: 3 }), svg("text", { x: x + 4, y: y + 14 }, label.slice(0, Math.max(0, Math.floor(w / 6.4) - 1))));
      made.addEventListener("click", () => show(box === top ? box.parent || box : box));
      picture.append(made);
      for (const child of [...box.children.values()].sort((a, b) => b.seconds - a.seconds)) {
        put(child, x, y + row);
        x += (child.seconds / top.seconds) * width;
      }
    };
    picture.replaceChildren();
    picture.setAttribute("viewBox", `0 0 ${width} ${row * depthOf(top)}`);
    put(top, 0, 0);
  };
  show(all);
  return [el("p", { class: "legend" }, "Time in kernels by module, widest first. Select a box to enlarge it, the uppermost one to go back."), picture];
}

// -- passes -----------------------------------------------------------------------------------------------------------
function passes(graph) {
  const page = graph.passes.map((p) => {
    const refused = p.notes.filter((n) => n.includes(" refused ")).length;
    const title = `${p.name}: ${p.ms.toFixed(2)} ms` + (p.notes.length ? `, ${p.notes.length - refused} done, ${refused} refused` : "");
    return p.notes.length ? el("details", { open: "" }, el("summary", {}, title), el("pre", {}, p.notes.join("\n"))) : el("div", { class: "legend" }, title);
  });
  return [...page, ...(graph.remarks.length ? [el("h2", {}, "Remarks"), el("pre", {}, graph.remarks.join("\n"))] : [])];
}

// -- the page ---------------------------------------------------------------------------------------------------------
const TABS = { Overview: overview, Stages: stages, Drawing: drawing, Memory: memory, Flame: flame, Passes: passes };
const WHOLE = ["Overview", "Flame"];  // of all graphs at once
const tabs = document.getElementById("tabs"), chooser = document.getElementById("graph");
function render() {
  for (const button of tabs.children) button.setAttribute("aria-selected", button.textContent === state.tab);
  const graph = data.graphs[state.graph];
  const whole = WHOLE.includes(state.tab);
  chooser.hidden = whole || !data.graphs.length;
  main.replaceChildren(...(whole || graph ? TABS[state.tab](graph) : [el("p", {}, "No graph was compiled.")]));
}
for (const name of Object.keys(TABS)) {
  if (name === "Flame" && !data.kernels.length) continue;
  const button = el("button", { role: "tab" }, name);
  button.addEventListener("click", () => { state.tab = name; render(); });
  tabs.append(button);
}
data.graphs.forEach((g, i) => chooser.append(el("option", { value: i }, `${g.name} (${g.phase})`)));
chooser.addEventListener("change", () => { state.graph = +chooser.value; state.more = null; state.open.clear(); render(); });
const theme = document.documentElement;
theme.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
document.getElementById("theme").addEventListener("click", () => { theme.dataset.theme = theme.dataset.theme === "dark" ? "light" : "dark"; });
render();
