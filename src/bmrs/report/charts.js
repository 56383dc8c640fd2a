// The charts, each a function (host, data of one setting, choices): what to plot, and what a point says.

// The same looks as in the printed figures.
const STYLES = {
  none: ["m-none", "4 4", "circle"], l2: ["m-l2", "2 3", "cross"], mean: ["m-mean", "8 3", "down"],
  snr: ["m-snr", "4 2", "diamond"], bmrs_n: ["m-n", null, "circle"], bmrs_u8: ["m-u8", "10 3 2 3", "square"],
  bmrs_u4: ["m-u4", "6 2 6 2 2 2", "up"], gradient: ["m-gradient", "7 2 2 2 2 2", "plus"],
};
const OTHERS = [["m-u8", "9 2 2 2", "star"], ["m-snr", "3 2", "diamond"], ["m-mean", "14 3", "square"]];

function style(method) {
  if (Object.hasOwn(STYLES, method)) return STYLES[method];
  const place = Object.keys(DATA.methods).indexOf(method);
  return OTHERS[Math.max(0, place) % OTHERS.length];
}
const shown = (method) => own(DATA.methods, method) ?? method;

// A line's look in small, for legends.
function sample(method) {
  const [look, dash, shape] = style(method);
  return svg("svg", { viewBox: "0 0 30 14", width: 30, height: 14, class: look, "aria-hidden": "true" },
    svg("line", { x1: 1, x2: 29, y1: 7, y2: 7, class: "curve", "stroke-dasharray": dash }),
    marker(shape, 15, 7, 4, { class: "dot" }));
}

function bounds(values, pad, least = 0) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const room = Math.max((high - low) * pad, least);
  return [low - room, high + room];
}

function curvesChart(host, place, { counting, hidden, close }) {
  const methods = Object.entries(place.methods).filter(([name]) => !hidden.has(name));
  if (!methods.length) return missing(host, "Choose a method above.");
  const heights = methods.flatMap(([, curve]) => curve.accuracy.filter(known));
  const top = Math.max(...heights, place.whole ? place.whole[0] : 0);
  const low = close ? top - 0.1 : Math.min(...heights, top) - 0.02;
  const domain = [Math.max(0, low), top + 0.07 * (top - low)];
  const kneed = methods.find(([name]) => name === "snr") ?? methods.find(([, curve]) => known(curve.knee[counting]));
  document.getElementById("whose-knee").textContent = kneed ? `knee of ${shown(kneed[0])}` : "knee of the curve";
  const many = methods.length > 3;
  plot(host, {
    label: `Test accuracy against compression, ${counting} counting. Arrow keys read the points.`,
    height: (width) => Math.max(300, Math.min(440, width * 0.52)),
    x: { domain: [0, 1], label: `parameters removed (${counting} counting)`, format: (v) => percent(v, 0) },
    y: { domain, ticks: ticks(...domain, 7).filter((t) => t <= 1), label: "test accuracy after one epoch of fine-tuning",
      format: (v) => percent(v, domain[1] - domain[0] < 0.05 ? 1 : 0) },
    draw(layer, x, y, box) {
      if (place.whole) {
        const at = y(place.whole[0]);
        layer.append(svg("line", { x1: box.left, x2: box.right, y1: at, y2: at, class: "reference" }),
          svg("text", { x: box.left + 4, y: at - 7, class: "note" }, `whole network ${percent(place.whole[0])}`));
      }
      const stops = svg("g");
      const series = methods.map(([name, curve]) => {
        const [look, dash, shape] = style(name);
        const points = curve.accuracy.map((accuracy, i) => ({ i, c: curve[counting][i], accuracy, sd: curve.sd[i] }))
          .filter((p) => known(p.c) && known(p.accuracy)).sort((a, b) => a.c - b.c);
        const group = svg("g", { class: look });
        const spreads = points.filter((p) => known(p.sd));
        const edge = (sign) => spreads.map((p) => [x(p.c), y(p.accuracy + sign * p.sd)]);
        if (spreads.length > 1) {
          group.append(svg("path", { d: line([...edge(1), ...edge(-1).reverse()]) + "Z", class: "band" }));
        }
        group.append(svg("path", { d: line(points.map((p) => [x(p.c), y(p.accuracy)])), class: "curve",
          "stroke-dasharray": dash }));
        // Sparse, at each line's own places, so that lines on top of each other can be told apart.
        const start = Object.keys(place.methods).indexOf(name) * 2;
        let last = -Infinity;
        points.slice(start).forEach((p) => {
          if (x(p.c) - last < (many ? 95 : 60)) return;
          last = x(p.c);
          group.append(marker(shape, x(p.c), y(p.accuracy), 3.6, { class: "dot" }));
        });
        const found = points.map((p) => ({ x: x(p.c), y: y(p.accuracy), title: shown(name), rows: [
          ["parameters removed", percent(p.c)], ["units removed", percent(curve.fraction[p.i])],
          ["accuracy", known(p.sd) ? `${percent(p.accuracy)} ± ${(100 * p.sd).toFixed(1)}` : percent(p.accuracy)],
          ["seeds", String(curve.n)]] }));
        const knee = curve.knee[counting];
        if (kneed && kneed[0] === name && known(knee) && known(curve[counting][knee])) {
          const [kx, ky] = [x(curve[counting][knee]), y(curve.accuracy[knee])];
          stops.append(svg("g", { class: look }, marker("diamond", kx, ky, 6.5, { class: "knee" })));
        }
        const stop = curve.boundary;
        if (stop && stop[counting]) {
          const mark = svg("g", { class: look });
          const [sx, sy] = [x(stop[counting][0]), y(stop.accuracy[0])];
          for (const [published, actual, accuracy] of stop.seeds) {
            const c = counting === "published" ? published : actual;
            if (known(c) && known(accuracy)) mark.append(svg("circle", { cx: x(c), cy: y(accuracy), r: 1.8, class: "seed" }));
          }
          mark.append(svg("line", { x1: sx, x2: sx, y1: sy, y2: box.bottom, class: "drop", "stroke-dasharray": dash }),
            svg("circle", { cx: sx, cy: sy, r: 8, class: "halo" }), marker(shape, sx, sy, 4.4, { class: "dot" }));
          stops.append(mark);
          found.push({ x: sx, y: sy, title: `${shown(name)} stops here`, rows: [
            ["parameters removed", `${spread(stop[counting], 100)} %`], ["units removed", `${spread(stop.fraction, 100)} %`],
            ["accuracy", `${spread(stop.accuracy, 100)} %`], ["seeds", String(stop.seeds.length)]] });
        }
        layer.append(group);
        return { name: shown(name), points: found };
      });
      layer.append(stops);
      return series;
    },
  });
}

// What a number is the mean of; nothing where it is one run's own.
function ofSeeds(counts) {
  const [least, most] = [Math.min(...counts), Math.max(...counts)];
  if (!(most > 1)) return "";
  return ` (mean of ${least === most ? most : `${least} to ${most}`} seeds)`;
}

function historyChart(host, cells, total) {
  const methods = Object.entries(cells).filter(([, cell]) => cell.history.length);
  const epochs = methods.flatMap(([, cell]) => cell.history.map(([epoch]) => epoch));
  const most = Math.max(total || 0, ...methods.flatMap(([, cell]) => cell.history.map(([, units]) => units)));
  plot(host, {
    label: "Units left after every epoch. Arrow keys read the points.",
    height: () => 300,
    x: { domain: [Math.min(0, ...epochs), Math.max(...epochs)], label: "epoch" },
    y: { domain: [0, most * 1.04], label: `units left${ofSeeds(methods.map(([, cell]) => cell.n))}`, format: count },
    draw(layer, x, y) {
      return methods.map(([name, cell], place) => {
        const [look, dash, shape] = style(name);
        const points = cell.history.map(([epoch, units]) => [x(epoch), y(units)]);
        const every = Math.max(6, Math.ceil(points.length / 5));
        layer.append(svg("g", { class: look },
          svg("path", { d: line(points), class: "curve", "stroke-dasharray": dash }),
          ...points.filter((_, i) => i % every === (place * 2 + 1) % every).map(([a, b]) => marker(shape, a, b, 3.6, { class: "dot" }))));
        return { name: shown(name), points: cell.history.map(([epoch, units], i) => ({ x: points[i][0], y: points[i][1],
          title: shown(name), rows: [["epoch", String(epoch)], ["units left", count(units)]] })) };
      });
    },
  });
}

function hatch(picture) {
  const id = `hatch-${unique++}`;
  picture.prepend(svg("defs", {}, svg("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)" }, svg("rect", { width: 6, height: 6, class: "hatch-ground" }),
    svg("line", { x1: 0, x2: 0, y1: 0, y2: 6, class: "hatch-line" }))));
  return `url(#${id})`;
}

function widthsChart(host, layers, { units, n }) {
  const names = Object.keys(layers).filter((name) => known(layers[name]));
  const most = Math.max(1, ...names.map((name) => layers[name]));
  const row = names.length > 12 ? 22 : 34;
  const widest = Math.max(...names.map((name) => name.length), 4);
  const left = (name) => (units[name] || [layers[name]])[0];
  const change = (name) => `${count(layers[name])} → ${count(left(name))}`;
  const longest = Math.max(...names.map((name) => change(name).length), 4);
  plot(host, {
    label: "Units of every layer before and after. Arrow keys read the layers.",
    height: () => Math.max(300, 72 + names.length * row),
    left: Math.min(150, 14 + widest * 7), right: 16 + longest * 7, near: "y",
    x: { domain: [0, most], label: `units${ofSeeds([n])}`, format: count },
    y: { domain: [names.length, 0], label: "layer", ticks: [] },
    draw(layer, x, y, box, picture) {
      const fill = hatch(picture);
      const points = names.map((name, i) => {
        const [middle, thick] = [y(i + 0.5), Math.min(24, row * 0.62, (y(0.6) - y(0)))];
        const now = left(name);
        const text = name.length > 18 ? `${name.slice(0, 17)}…` : name;
        picture.append(svg("text", { x: box.left - 8, y: middle + 4, "text-anchor": "end", class: "value" }, text),
          svg("text", { x: x(layers[name]) + 8, y: middle + 4, class: "value" }, change(name)));
        layer.append(
          svg("rect", { x: box.left, y: middle - thick / 2, width: x(layers[name]) - box.left, height: thick, fill, class: "gone-edge" }),
          svg("rect", { x: box.left, y: middle - thick / 2, width: Math.max(0, x(now) - box.left), height: thick, class: "kept" }));
        return { x: x(now), y: middle, title: name, rows: [["before", count(layers[name])],
          ["after", units[name] ? spread(units[name], 1, Number.isInteger(now) && !units[name][1] ? 0 : 1) : count(now)],
          ["removed", percent(1 - now / layers[name])]] };
      });
      return [{ name: "layers", points }];
    },
  });
}

function histogramChart(host, gates, method) {
  const { kept, removed } = gates.histogram[method];
  const bins = kept.length;
  const most = Math.max(10, ...kept.map((k, i) => k + removed[i]));
  const bend = (v) => Math.asinh(v / 10);
  plot(host, {
    label: "Histogram of the gates' posterior means. Arrow keys read the bars.",
    height: () => 330, near: "x",
    x: { domain: [0, 1], label: "posterior mean E[θ] of the gate", ticks: [0, 0.2, 0.4, 0.6, 0.8, 1] },
    y: { domain: [0, most * 1.15], label: `units${ofSeeds([gates.n])}`, bend, format: count,
      ticks: [0, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000].filter((t) => t <= most * 1.15) },
    draw(layer, x, y, box, picture) {
      const fill = hatch(picture);
      const points = [];
      kept.forEach((k, i) => {
        const [from, wide] = [x(i / bins), x(1 / bins) - x(0) - 1];
        const both = k + removed[i];
        if (!both) return;
        const bar = (low, high, attributes) => layer.append(svg("rect", { x: from, width: wide, y: y(high),
          height: Math.max(0.5, y(low) - y(high)), ...attributes }));
        if (removed[i]) bar(0, removed[i], { fill, class: "gone-edge" });
        if (k) bar(removed[i], both, { class: "kept" });
        points.push({ x: from + wide / 2, y: y(both), title: `E[θ] ${(i / bins).toFixed(2)} to ${((i + 1) / bins).toFixed(2)}`,
          rows: [["kept", count(k)], ["removed", count(removed[i])]] });
      });
      const prior = x(DATA.prior_mean);
      layer.append(svg("line", { x1: prior, x2: prior, y1: box.top, y2: box.bottom, class: "reference" }),
        svg("text", { x: prior + 5, y: box.top + 6, class: "note" }, "mean of the prior"));
      return [{ name: "bars", points }];
    },
  });
}

// A power of ten as an axis says it: 1,000, then 10⁴.
function power(value) {
  const exponent = Math.round(Math.log10(Math.abs(value) || 1));
  const digits = exponent < 4 ? count(Math.abs(value)) : `10${[...String(exponent)].map((d) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[d]).join("")}`;
  return (value < 0 ? "−" : "") + digits;
}

function evidenceChart(host, gates, method) {
  const scores = gates.delta_f[method];
  const tau = gates.tolerance[method];
  const all = scores.filter(known);
  const bend = (v) => Math.sign(v) * Math.log10(1 + Math.abs(v));
  const low = Math.min(-10, ...all) * 1.6;
  const high = Math.max(3, ...all.map((v) => v * 1.6));
  const powers = Array.from({ length: 12 }, (_, i) => 10 ** i);
  plot(host, {
    label: "Evidence ΔF against the posterior mean, unit by unit. Arrow keys read the units.",
    height: () => 330, left: 58,
    x: { domain: [-0.02, 1.02], label: "posterior mean E[θ] of the gate", ticks: [0, 0.2, 0.4, 0.6, 0.8, 1] },
    y: { domain: [low, high], label: "ΔF: log evidence without − with the unit (nats)", bend,
      format: power, ticks: [...powers.map((p) => -p), 0, ...powers].filter((t) => t >= low && t <= high) },
    draw(layer, x, y, box) {
      const edge = y(-tau);
      // Another criterion decided: the evidence is a second opinion.
      const rule = gates.removed_by && gates.removed_by !== method ? `${shown(method)} would remove` : "removed";
      layer.append(svg("rect", { x: box.left, y: box.top - 8, width: box.right - box.left, height: edge - box.top + 8, class: "zone" }),
        svg("line", { x1: box.left, x2: box.right, y1: edge, y2: edge, class: "tolerance" }),
        svg("text", { x: box.right - 4, y: box.top + 8, "text-anchor": "end", class: "note gone-text" },
          `${rule}: ${tau ? `ΔF ≥ −τ, τ = ${tau.toFixed(2)} nats` : "ΔF ≥ 0"}`));
      const series = gates.layers.map((name) => ({ name, points: [] }));
      gates.mean.forEach((mean, i) => {
        if (!known(mean) || !known(scores[i])) return;
        const out = gates.removed ? gates.removed[i] === 1 : scores[i] >= -tau;
        const [px, py] = [x(mean), y(scores[i])];
        layer.append(marker(SHAPES[gates.layer[i] % SHAPES.length], px, py, 3.4, { class: out ? "unit gone" : "unit stay" }));
        series[gates.layer[i]].points.push({ x: px, y: py, title: gates.layers[gates.layer[i]], rows: [
          ["E[θ]", mean.toFixed(3)], ["ΔF", `${count(scores[i]).replace("-", "−")} nats`], ["so", out ? "removed" : "kept"]] });
      });
      return series;
    },
  });
}

// A mean with its spread, across as well where the other number has one too.
function cross(layer, look, shape, [x, y], across, up, size = 5) {
  layer.append(svg("g", { class: look },
    across ? svg("line", { x1: across[0], x2: across[1], y1: y, y2: y, class: "error" }) : null,
    up ? svg("line", { x1: x, x2: x, y1: up[0], y2: up[1], class: "error" }) : null,
    marker(shape, x, y, size, { class: "dot" })));
}

const around = (scaled, pair) => [scaled(pair[0] - (pair[1] || 0)), scaled(pair[0] + (pair[1] || 0))];
const ends = (pair) => [pair[0] - (pair[1] || 0), pair[0] + (pair[1] || 0)];
const key = (text, ...marks) => html("span", { class: "key" },
  svg("svg", { viewBox: "0 0 22 14", width: 22, height: 14, "aria-hidden": "true" }, ...marks), text);
const WHOLE_KEY = () => key("whole network", svg("line", { x1: 0, x2: 22, y1: 7, y2: 7, class: "reference" }));
const PAPER_KEY = (text) => key(text, svg("g", { class: "m-paper" }, marker("cross", 11, 7, 4.5, { class: "dot" })));

// ``cells``: one for each price; ``pruned``: the setting's methods, for the whole network and the paper's numbers.
function pricesChart(host, cells, pruned) {
  const use = cells.filter((c) => c.actual && c.accuracy);
  if (!use.length) return missing(host);
  const whole = own(pruned, "none")?.accuracy;
  const paper = own(pruned, "bmrs_n")?.paper;
  const prices = [...new Set(cells.map((cell) => cell.price))];
  const xs = [...use.flatMap((c) => ends(c.actual)), ...(paper ? ends(paper.published) : [])];
  const ys = [...use.flatMap((c) => ends(c.accuracy)), ...(paper ? ends(paper.accuracy) : []), ...(whole ? [whole[0]] : [])];
  const [xDomain, yDomain] = [bounds(xs, 0.12, 0.01), bounds(ys, 0.15, 0.005)];
  xDomain[1] = Math.min(1, xDomain[1]);
  const looks = ["m-snr", "m-n", "m-u4", "m-u8", "m-mean", "m-gradient"];
  document.getElementById("legend-prices").replaceChildren(
    ...prices.map((price, i) => key(price, svg("g", { class: looks[i % looks.length] },
      marker(SHAPES[i % SHAPES.length], 11, 7, 4.5, { class: "dot" })))),
    ...(paper ? [PAPER_KEY("paper's BMRS_N, its own counting")] : []), ...(whole ? [WHOLE_KEY()] : []));
  return plot(host, {
    label: "Accuracy against compression, one point per price. Arrow keys read the points.",
    height: () => 320,
    x: { domain: xDomain, label: "parameters removed (actual counting)", format: (v) => percent(v, 0) },
    y: { domain: yDomain, label: "test accuracy", format: (v) => percent(v, yDomain[1] - yDomain[0] < 0.04 ? 1 : 0) },
    draw(layer, x, y, box) {
      if (whole) layer.append(svg("line", { x1: box.left, x2: box.right, y1: y(whole[0]), y2: y(whole[0]), class: "reference" }));
      const extra = [];
      if (paper) {
        const at = [x(paper.published[0]), y(paper.accuracy[0])];
        cross(layer, "m-paper", "cross", at, around(x, paper.published), around(y, paper.accuracy));
        extra.push({ x: at[0], y: at[1], title: "paper's BMRS_N", rows: [
          ["parameters removed, its counting", `${spread(paper.published, 100)} %`], ["accuracy", `${spread(paper.accuracy, 100)} %`]] });
      }
      // No label over a mark or another label: a name without room is left to the table and the tip.
      const taken = [...use.map((c) => [x(c.actual[0]), y(c.accuracy[0])]), ...extra.map((p) => [p.x, p.y])]
        .map(([a, b]) => [a - 6, b - 6, 12, 12]);
      return [{ name: "prices", points: [...extra, ...use.map((cell) => {
        const place = prices.indexOf(cell.price);
        const [px, py] = [x(cell.actual[0]), y(cell.accuracy[0])];
        const name = cell.strength === 1 ? cell.price : `${cell.price}, s = ${+cell.strength.toPrecision(3)}`;
        cross(layer, looks[place % looks.length], SHAPES[place % SHAPES.length], [px, py],
          around(x, cell.actual), around(y, cell.accuracy));
        const length = wide(name, host);
        const free = [[px + 9, py - 18], [px - 9 - length, py - 18], [px + 9, py + 5], [px - 9 - length, py + 5],
          [px - length / 2, py - 30], [px - length / 2, py + 22]]
          .find(([a, b]) => a > box.left && a + length < box.right + 8 && b > box.top - 8 && b + 14 < box.bottom
            && !taken.some(([c, d, w, h]) => a < c + w && c < a + length && b < d + h && d < b + 14));
        if (free) {
          taken.push([...free, length, 14]);
          layer.append(svg("text", { x: free[0], y: free[1] + 11, class: "note" }, name));
        }
        return { x: px, y: py, title: name, rows: [["parameters removed", `${spread(cell.actual, 100)} %`],
          ["accuracy", `${spread(cell.accuracy, 100)} %`], ["method", shown(cell.method)], ["seeds", String(cell.n)]] };
      })].sort((a, b) => a.x - b.x) }];
    },
  });
}

// ``pruned``: the setting's methods, for what the paper has of some p₁, and the whole network.
function bitsChart(host, cells, field, label, pruned) {
  const use = cells.filter((cell) => cell[field]);
  if (!use.length) return missing(host);
  const whole = field === "accuracy" ? own(pruned, "none")?.accuracy : undefined;
  const papers = use.map((cell) => [cell.p1, own(pruned, `bmrs_u${cell.p1}`)?.paper?.[field]]).filter(([, paper]) => paper);
  document.getElementById(`legend-${host.id.replace("chart-", "")}`).replaceChildren(
    key("BMRS_U", svg("g", { class: "m-u8" }, svg("line", { x1: 0, x2: 22, y1: 7, y2: 7, class: "curve" }),
      marker("square", 11, 7, 4.5, { class: "dot" }))),
    ...(papers.length ? [PAPER_KEY("paper")] : []), ...(whole ? [WHOLE_KEY()] : []));
  const domain = bounds([...use.flatMap((c) => ends(c[field])), ...papers.flatMap(([, paper]) => ends(paper)),
    ...(whole ? [whole[0]] : [])], 0.2, 0.01);
  const [first, last] = [use[0].p1, use.at(-1).p1];
  return plot(host, {
    label: `${label} against p1. Arrow keys read the points.`,
    height: () => 260,
    x: { domain: [first - 0.5, last + 0.5], label: "p₁ (bits)", ticks: use.map((c) => c.p1) },
    y: { domain, label, format: (v) => percent(v, domain[1] - domain[0] < 0.05 ? 1 : 0) },
    draw(layer, x, y, box) {
      const points = use.map((cell) => [x(cell.p1), y(cell[field][0])]);
      if (whole) layer.append(svg("line", { x1: box.left, x2: box.right, y1: y(whole[0]), y2: y(whole[0]), class: "reference" }));
      layer.append(svg("g", { class: "m-u8" }, svg("path", { d: line(points), class: "curve" })));
      use.forEach((cell, i) => cross(layer, "m-u8", "square", points[i], null, around(y, cell[field]), 4.5));
      // A little to the side: both spreads stay visible.
      const beside = papers.map(([p1, paper]) => ({ x: x(p1) + 9, y: y(paper[0]), title: `paper, p₁ = ${p1}`,
        rows: [[label, `${spread(paper, 100)} %`]] }));
      beside.forEach((point, i) => cross(layer, "m-paper", "cross", [point.x, point.y], null, around(y, papers[i][1])));
      return [{ name: label, points: use.map((cell, i) => ({ x: points[i][0], y: points[i][1], title: `p₁ = ${cell.p1}`,
        rows: [[label, `${spread(cell[field], 100)} %`], ["seeds", String(cell.n)]] })) }, { name: "paper", points: beside }];
    },
  });
}

function missing(host, text = "Not run for this setting.") {
  host.spec = null;
  host.onkeydown = null;
  host.tabIndex = -1;
  host.dataset.points = 0;
  host.replaceChildren(html("p", { class: "missing" }, text));
}
