// What is chosen, and redrawing what depends on it.

const DATA = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
root.classList.add("js");
const find = (id) => document.getElementById(id);
const choice = {
  setting: find("setting")?.value ?? Object.keys(DATA.settings)[0],
  counting: root.dataset.counting,
  hidden: new Set(),
  close: false,
};
// The gradient criterion belongs to the appendix, and without it the chart is the paper's figure.
if (Object.values(DATA.curves).some((place) => Object.keys(place.methods).length > 6)) choice.hidden.add("gradient");

// A part that was run for few settings shows one it has, and says so, where the chosen one is not among them.
function settingOf(part) {
  if (Object.hasOwn(DATA[part], choice.setting)) return choice.setting;
  return Object.keys(DATA.settings).find((key) => Object.hasOwn(DATA[part], key));
}

const charts = {
  "chart-curves": (host) => {
    const place = own(DATA.curves, choice.setting);
    if (!place) return missing(host);
    const counted = Object.values(place.methods).some((curve) => curve[choice.counting].some(known));
    return counted ? curvesChart(host, place, choice) : missing(host, "This counting was not recorded here.");
  },
  "chart-history": (host) => {
    const cells = own(DATA.pruned, choice.setting);
    const has = cells && Object.values(cells).some((cell) => cell.history.length);
    const total = Object.values(DATA.settings[choice.setting].layers).reduce((sum, units) => sum + (units || 0), 0);
    return has ? historyChart(host, cells, total) : missing(host);
  },
  "chart-widths": (host) => {
    const cell = own(own(DATA.pruned, choice.setting), find("method-widths").value);
    const layers = DATA.settings[choice.setting].layers;
    return cell && Object.keys(cell.units).length && Object.keys(layers).length
      ? widthsChart(host, layers, cell) : missing(host);
  },
  "chart-means": (host) => {
    const gates = own(DATA.gates, choice.setting);
    const method = find("method-gates").value;
    return gates && own(gates.histogram, method) ? histogramChart(host, gates, method) : missing(host);
  },
  "chart-evidence": (host) => {
    const gates = own(DATA.gates, choice.setting);
    const method = find("method-gates").value;
    return gates && own(gates.delta_f, method) ? evidenceChart(host, gates, method) : missing(host);
  },
  "chart-prices": (host) => {
    const key = settingOf("prices");
    const cells = own(DATA.prices, key);
    return cells ? pricesChart(host, cells, own(DATA.pruned, key)) : missing(host);
  },
  "chart-bits-accuracy": (host) => {
    const key = settingOf("bits");
    const cells = own(DATA.bits, key);
    return cells ? bitsChart(host, cells, "accuracy", "test accuracy", own(DATA.pruned, key)) : missing(host);
  },
  "chart-bits-removed": (host) => {
    const key = settingOf("bits");
    const [cells, { counting }] = [own(DATA.bits, key), choice];
    return cells ? bitsChart(host, cells, counting, `parameters removed (${counting} counting)`, own(DATA.pruned, key))
      : missing(host);
  },
};

function legend() {
  const host = find("legend-curves");
  if (!host) return;
  const methods = Object.keys(own(DATA.curves, choice.setting)?.methods ?? {});
  host.replaceChildren(...methods.map((name) => {
    const button = html("button", { type: "button", class: "chip", "aria-pressed": String(!choice.hidden.has(name)) },
      sample(name), shown(name));
    button.addEventListener("click", () => {
      if (!choice.hidden.delete(name)) choice.hidden.add(name);
      button.setAttribute("aria-pressed", String(!choice.hidden.has(name)));
      draw(["chart-curves"]);
    });
    return button;
  }));
}

function historyLegend() {
  const host = find("legend-history");
  if (!host) return;
  const cells = own(DATA.pruned, choice.setting) ?? {};
  const names = Object.keys(cells).filter((name) => cells[name].history.length);
  host.replaceChildren(...names.map((name) => html("span", { class: "key" }, sample(name), shown(name))));
}

function layersLegend() {
  const host = find("legend-layers");
  if (!host) return;
  const names = own(DATA.gates, choice.setting)?.layers ?? [];
  host.replaceChildren(...names.map((name, i) => html("span", { class: "key" },
    svg("svg", { viewBox: "0 0 14 14", width: 14, height: 14, "aria-hidden": "true" },
      marker(SHAPES[i % SHAPES.length], 7, 7, 4, { class: "unit stay" })), name)));
}

// The chart's points that matter, as numbers: where each rule stops, and the knee of each curve.
function stops() {
  const host = find("stops");
  if (!host) return;
  const place = own(DATA.curves, choice.setting);
  const rows = Object.entries(place?.methods ?? {}).map(([name, curve]) => {
    const knee = curve.knee[choice.counting];
    const stop = curve.boundary;
    const cells = [
      stop ? spread(stop.fraction, 100) : "–", stop ? spread(stop[choice.counting], 100) : "–",
      stop ? spread(stop.accuracy, 100) : "–",
      known(knee) ? (100 * curve[choice.counting][knee]).toFixed(1) : "–",
      known(knee) ? (100 * curve.accuracy[knee]).toFixed(1) : "–",
    ];
    return html("tr", {}, html("th", { scope: "row" }, sample(name), " ", html("span", { class: "nb" }, shown(name))),
      ...cells.map((text) => html("td", {}, text)));
  });
  host.replaceChildren(...rows);
}

function correlations() {
  const host = find("correlations");
  if (!host) return;
  const found = own(DATA.correlations, choice.setting);
  if (!found) {
    missing(host);
    return;
  }
  const head = html("tr", {}, html("td"), ...found.methods.map((name) => html("th", { scope: "col" }, html("span", {}, shown(name)))));
  const rows = found.spearman.map((row, i) => html("tr", {}, html("th", { scope: "row" }, shown(found.methods[i])),
    ...row.map((value) => {
      // Squared: most correlations are high, and differ there.
      const weight = Math.min(1, (value ?? 0) ** 2);
      const cell = html("td", { class: weight > 0.68 ? "strong" : weight > 0.42 ? "middle" : null },
        known(value) ? value.toFixed(2).replace("-", "−") : "–");
      cell.style.setProperty("--v", `${Math.round(100 * weight)}%`);
      if (value < 0) cell.classList.add("negative");
      return cell;
    })));
  const seeds = found.n > 1 ? `, mean of ${found.n} seeds` : "";
  find("correlations-note").textContent = `Spearman rank correlation between the criteria${seeds}.`;
  host.replaceChildren(html("table", { class: "heat" }, html("thead", {}, head), html("tbody", {}, ...rows)));
}

function draw(names = Object.keys(charts)) {
  for (const name of names) {
    const host = find(name);
    if (host) charts[name](host);
  }
}

// Options of a method's select: those the setting has, the one chosen before kept where it can be.
function methods(id, names) {
  const select = find(id);
  if (!select) return;
  const before = select.value;
  select.replaceChildren(...names.map((name) => html("option", { value: name }, shown(name))));
  select.value = names.includes(before) ? before : (names.find((name) => name.startsWith("bmrs_n")) ?? names.at(-1) ?? "");
  select.disabled = names.length < 2;
}

function everything() {
  root.dataset.counting = choice.counting;
  methods("method-widths", Object.keys(own(DATA.pruned, choice.setting) ?? {}).filter((name) => name !== "none"));
  methods("method-gates", Object.keys(own(DATA.gates, choice.setting)?.delta_f ?? {}));
  legend();
  historyLegend();
  layersLegend();
  stops();
  correlations();
  for (const place of document.querySelectorAll("[data-names-setting]")) {
    const part = place.dataset.namesSetting;
    const key = part === "prices" || part === "bits" ? settingOf(part) : choice.setting;
    const chosen = DATA.settings[choice.setting]?.name ?? "";
    place.textContent = key === choice.setting ? chosen : `${DATA.settings[key].name} (not run for ${chosen})`;
  }
  draw();
}

find("setting")?.addEventListener("change", (event) => {
  choice.setting = event.target.value;
  everything();
});
for (const input of document.querySelectorAll("input[name=counting]")) {
  input.addEventListener("change", () => {
    choice.counting = input.value;
    everything();
  });
}
find("close")?.addEventListener("change", (event) => {
  choice.close = event.target.checked;
  draw(["chart-curves"]);
});
find("method-widths")?.addEventListener("change", () => draw(["chart-widths"]));
find("method-gates")?.addEventListener("change", () => draw(["chart-means", "chart-evidence"]));

find("download").addEventListener("click", () => {
  const file = new Blob([JSON.stringify(DATA, null, 1)], { type: "application/json" });
  const link = html("a", { href: URL.createObjectURL(file), download: "bmrs-report.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
});

// Charts follow the width of their place; a closed part cannot be printed.
let width = root.clientWidth;
new ResizeObserver(() => {
  if (root.clientWidth !== width) {
    width = root.clientWidth;
    draw();
  }
}).observe(root);
let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  opened.forEach((part) => (part.open = true));
});
addEventListener("afterprint", () => opened.forEach((part) => (part.open = false)));

everything();
