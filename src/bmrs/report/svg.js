// Drawing: elements, scales, axes, and one way to explore any chart by pointer, finger or keyboard.
// Text from the data only ever becomes text nodes.

const SVG = "http://www.w3.org/2000/svg";
let unique = 0;

function build(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
const svg = (tag, attributes = {}, ...children) => build(document.createElementNS(SVG, tag), attributes, children);
const html = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);

// An object's own entry: a setting may be called "constructor".
const own = (object, key) => (object && Object.hasOwn(object, key) ? object[key] : undefined);
const known = (value) => typeof value === "number";

const percent = (value, digits = 1) => (known(value) ? `${(100 * value).toFixed(digits)} %` : "–");
const count = (value) => (known(value) ? value.toLocaleString("en-GB", { maximumFractionDigits: 1 }) : "–");
function spread(pair, scale = 1, digits = 1) {
  if (!pair) return "–";
  const sd = known(pair[1]) ? ` ± ${(scale * pair[1]).toFixed(digits)}` : "";
  return `${(scale * pair[0]).toFixed(digits)}${sd}`;
}

function scale(domain, range, bend = (v) => v) {
  const [a, b] = domain.map(bend);
  return (value) => range[0] + ((bend(value) - a) / (b - a || 1)) * (range[1] - range[0]);
}

function ticks(low, high, wanted) {
  const raw = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((m) => m * power >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toFixed(10));
  return found;
}

// How wide a text of the charts' small print is, in pixels: fonts differ too much to guess.
const pen = document.createElement("canvas").getContext("2d");
function wide(text, host, size = 12) {
  pen.font = `${size}px ${getComputedStyle(host).fontFamily}`;
  return pen.measureText(text).width;
}

const SHAPES = ["circle", "square", "diamond", "up", "down", "plus", "cross", "star"];
function marker(shape, x, y, r, attributes = {}) {
  const place = (points) => "M" + points.map(([a, b]) => `${(x + a * r).toFixed(1)} ${(y + b * r).toFixed(1)}`).join("L");
  const outlines = {
    square: place([[-0.88, -0.88], [0.88, -0.88], [0.88, 0.88], [-0.88, 0.88]]) + "Z",
    diamond: place([[0, -1.25], [1.1, 0], [0, 1.25], [-1.1, 0]]) + "Z",
    up: place([[0, -1.15], [1.1, 0.85], [-1.1, 0.85]]) + "Z",
    down: place([[0, 1.15], [1.1, -0.85], [-1.1, -0.85]]) + "Z",
    plus: place([[-1.1, 0], [1.1, 0]]) + place([[0, -1.1], [0, 1.1]]),
    cross: place([[-0.9, -0.9], [0.9, 0.9]]) + place([[-0.9, 0.9], [0.9, -0.9]]),
    star: place([[-1.1, 0], [1.1, 0]]) + place([[-0.6, -1], [0.6, 1]]) + place([[-0.6, 1], [0.6, -1]]),
  };
  if (!outlines[shape]) return svg("circle", { cx: x.toFixed(1), cy: y.toFixed(1), r, ...attributes });
  return svg("path", { d: outlines[shape], ...attributes });
}

function line(points) {
  return points.length ? "M" + points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L") : "";
}

// A chart in `host`: axes from `spec`, marks from spec.draw(layer, x, y, box), which returns the points to explore as
// [{name, points: [{x, y, title, rows}]}], x and y in pixels. spec.near: bars are met along one axis, "x" or "y".
function plot(host, spec) {
  host.spec = spec;
  const width = Math.max(260, host.clientWidth || 640);
  const height = spec.height(width);
  const box = { left: spec.left || 46, right: width - (spec.right || 22), top: 30, bottom: height - (spec.foot || 42) };
  const y = scale(spec.y.domain, [box.bottom, box.top], spec.y.bend);
  const written = spec.y.format || String;
  // Near zero a bent axis is crowded: what is closest to zero keeps its label.
  const yTicks = [];
  for (const value of [...(spec.y.ticks || ticks(...spec.y.domain, (box.bottom - box.top) / 46))]
    .sort((a, b) => Math.abs(a) - Math.abs(b))) {
    if (yTicks.every((other) => Math.abs(y(other) - y(value)) >= 14)) yTicks.push(value);
  }
  box.left = Math.max(box.left, 10 + Math.ceil(Math.max(0, ...yTicks.map((value) => wide(written(value), host)))));
  const x = scale(spec.x.domain, [box.left, box.right], spec.x.bend);
  const clip = `clip-${unique++}`;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spec.label, class: "plot" });
  picture.append(svg("defs", {}, svg("clipPath", { id: clip }, svg("rect", {
    x: box.left - 1, y: box.top - 8, width: box.right - box.left + 10, height: box.bottom - box.top + 16 }))));
  const axes = svg("g", { class: "axes", "aria-hidden": "true" });
  const xTicks = spec.x.ticks || ticks(...spec.x.domain, Math.min(10, (box.right - box.left) / 75));
  for (const value of yTicks) {
    const at = y(value);
    axes.append(svg("line", { x1: box.left, x2: box.right, y1: at, y2: at, class: "grid" }));
    axes.append(svg("text", { x: box.left - 8, y: at + 4, "text-anchor": "end" }, written(value)));
  }
  for (const value of xTicks) {
    const text = (spec.x.format || String)(value);
    axes.append(svg("line", { x1: x(value), x2: x(value), y1: box.bottom, y2: box.bottom + 5, class: "tick" }));
    axes.append(svg("text", { x: x(value), y: box.bottom + 19, "text-anchor": "middle" }, text));
  }
  axes.append(svg("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, class: "axis" }));
  axes.append(svg("text", { x: 0, y: 13, class: "name" }, spec.y.label));
  axes.append(svg("text", { x: box.right, y: height - 4, "text-anchor": "end", class: "name" }, spec.x.label));
  const marks = svg("g", { "clip-path": `url(#${clip})` });
  picture.append(axes, marks);
  const series = spec.draw(marks, x, y, box, picture).filter((one) => one.points.length);
  host.replaceChildren(picture);
  host.dataset.points = series.reduce((sum, one) => sum + one.points.length, 0);
  explore(host, picture, series, width, height, box, spec.near);
}

// The nearest point under a pointer or finger; arrow keys walk along a line and from line to line.
function explore(host, picture, series, width, height, box, near) {
  const tip = html("div", { class: "tip", role: "status", "aria-live": "polite" });
  tip.hidden = true;
  const ring = svg("circle", { r: 8, class: "ring" });
  ring.style.display = "none";
  picture.append(ring);
  host.append(tip);
  host.tabIndex = series.length ? 0 : -1;
  let at = null;

  function hide() {
    tip.hidden = true;
    ring.style.display = "none";
  }
  function show(s, p) {
    at = [s, p];
    const point = series[s].points[p];
    const rows = point.rows.flatMap(([name, value]) => [html("dt", {}, name), html("dd", {}, value)]);
    tip.replaceChildren(html("strong", {}, point.title ?? series[s].name), html("dl", {}, ...rows));
    tip.hidden = false;
    ring.style.display = "";
    ring.setAttribute("cx", point.x);
    ring.setAttribute("cy", point.y);
    const factor = picture.getBoundingClientRect().width / width || 1;
    const [px, py] = [point.x * factor, point.y * factor];
    // Beside the point; where there is no room, as on a phone, above or below it: never over it.
    const [right, left] = [px + 18, px - 18 - tip.offsetWidth];
    const beside = right + tip.offsetWidth <= host.clientWidth ? right : left >= 0 ? left : null;
    const over = py > tip.offsetHeight + 18 ? py - 18 - tip.offsetHeight : py + 18;
    tip.style.left = `${beside ?? Math.max(0, Math.min(px - tip.offsetWidth / 2, host.clientWidth - tip.offsetWidth))}px`;
    tip.style.top = `${beside === null ? over
      : Math.max(0, Math.min(py - tip.offsetHeight / 2, height * factor - tip.offsetHeight))}px`;
  }
  function nearest(event) {
    const area = picture.getBoundingClientRect();
    const factor = area.width / width || 1;
    const [mx, my] = [(event.clientX - area.left) / factor, (event.clientY - area.top) / factor];
    let best = null;
    series.forEach((one, s) => one.points.forEach((point, p) => {
      const away = near === "x" ? Math.abs(point.x - mx) : near === "y" ? Math.abs(point.y - my)
        : Math.hypot(point.x - mx, point.y - my);
      if (point.y >= box.top - 8 && point.y <= box.bottom + 8 && (!best || away < best[0])) best = [away, s, p];
    }));
    if (best && best[0] < (near ? 24 : 60)) show(best[1], best[2]);
    else hide();
  }
  picture.addEventListener("pointermove", nearest);
  picture.addEventListener("pointerdown", nearest);
  picture.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
  host.onblur = hide;
  host.onkeydown = (event) => {
    if (!series.length || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Escape") return hide();
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const edge = { Home: 0, End: Infinity }[event.key];
    if (!step && edge === undefined) return;
    event.preventDefault();
    const [s, p] = at ?? [0, step ? -Math.max(0, step[1]) : 0];
    const next = step ? (s + step[0] + series.length) % series.length : s;
    const wanted = edge ?? p + step[1];
    show(next, Math.max(0, Math.min(series[next].points.length - 1, wanted)));
  };
}
