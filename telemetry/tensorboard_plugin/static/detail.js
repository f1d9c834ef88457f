// Everything about one layer: its statistics at a step and over time, histograms, pictures, alerts.

import { alertText } from "./alert_list.js";
import { drawChart, legendOf } from "./chart.js";
import { dropDown, element, fill } from "./dom.js";
import { columnAt } from "./field.js";
import { formatNumber, formatStep, formatValue } from "./format.js";
import { drawHistogram } from "./histogram.js";
import { titleOf } from "./rows.js";

const MAX_CURVES = 4;

export class Detail {
  /** @param {Object} on `close()`, `move(steps)`, `statistic(name)`, `movers()` or null */
  constructor(on) {
    this.on = on;
    this.node = element("section", { class: "detail", "aria-label": "Layer" });
    this.histogramChoice = "";
    this.data = null;
    this.request = 0;
  }

  /** Whether it shows, or loads, a layer of a run. */
  isOf(run, name) {
    return this.asked?.run === run && this.asked.layer.name === name;
  }

  /** Loads what belongs to a layer; what was asked for before and comes later is ignored. */
  async load(source, run, layer) {
    const request = ++this.request;
    this.data = null;
    this.asked = { run, layer };
    const parts = await Promise.allSettled([
      source.layer(run, layer.name),
      source.histograms(run, layer.name),
      source.images(run, layer.name),
    ]);
    if (request !== this.request) return;
    const [series, histograms, images] = parts.map((part) => part.value ?? null);
    const failed = parts.find((part) => part.status === "rejected");
    this.data = { source, run, series, histograms, images, error: failed?.reason?.message };
  }

  /** @param {Object} shown `run`, `isOneOfTwo`, `layer`, `step`, `statistic`, `statistics`, `view`, `alerts`, `theme` */
  show(shown) {
    this.shown = shown;
    const { run, layer } = shown;
    const data = this.isOf(run, layer.name) ? this.data : null;
    fill(
      this.node,
      this.#heading(),
      data ? null : element("p", { class: "muted" }, "Loading…"),
      data?.error ? element("p", { class: "failure" }, data.error) : null,
      data?.series ? this.#table(data.series) : null,
      data?.series ? this.#curves(data.series) : null,
      data?.histograms?.length ? this.#histograms(data.histograms) : null,
      data?.images?.length ? this.#images(data) : null,
      this.#alerts(),
    );
    this.node.dataset.layer = layer.name;
    this.node.dataset.loaded = data ? "true" : "false";
  }

  clear() {
    this.request++;
    this.data = this.asked = null;
    fill(this.node);
    delete this.node.dataset.layer;
    delete this.node.dataset.loaded;
  }

  #heading() {
    const { run, isOneOfTwo, layer, step } = this.shown;
    const shapes = layer.parameters
      .map((p) => `${p.name.split(".").pop()} ${p.shape.join("×") || "scalar"}`)
      .join(", ");
    const button = (text, title, onclick) =>
      element("button", { title, "aria-label": title, dataset: { key: title }, onclick }, text);
    return element(
      "header",
      {},
      element(
        "h2",
        {},
        titleOf(layer),
        button("✕", "Close (Esc)", () => this.on.close()),
      ),
      isOneOfTwo ? element("p", { class: "run-name" }, run) : null,
      element("p", { class: "muted" }, [layer.type, shapes].filter(Boolean).join(" · ")),
      element(
        "p",
        { class: "step-navigation" },
        button("‹", "Previous measured step (←)", () => this.on.move(-1)),
        element("b", {}, step === null ? "no step chosen" : `step ${formatStep(step)}`),
        button("›", "Next measured step (→)", () => this.on.move(1)),
        this.on.movers && step !== null
          ? element("button", { class: "wide", dataset: { key: "movers" }, onclick: this.on.movers }, "Who moved first?")
          : null,
      ),
    );
  }

  /** Each statistic with its value and a small curve; a click shows it in the picture. */
  #table(series) {
    const { statistics, statistic, step, theme, view } = this.shown;
    const rows = statistics
      .filter((known) => series.statistics.has(known.name))
      .map((known) => {
        const curve = series.statistics.get(known.name);
        const value = curve.values[columnAt(curve.steps, step ?? Infinity)] ?? -1;
        const canvas = element("canvas", {});
        drawSpark(canvas, curve, known, view, theme, step);
        return element(
          "tr",
          { class: known.name === statistic.name ? "chosen" : "" },
          element(
            "th",
            { scope: "row", title: known.description },
            element(
              "button",
              {
                dataset: { key: `statistic ${known.name}` },
                onclick: () => this.on.statistic(known.name),
              },
              known.title,
            ),
          ),
          element(
            "td",
            { class: Number.isFinite(value) ? "" : "nonfinite" },
            formatValue(known, value),
          ),
          element("td", {}, canvas),
        );
      });
    return element("table", { class: "statistics" }, element("tbody", {}, ...rows));
  }

  #curves(series) {
    const { statistic, theme, view, step, alerts } = this.shown;
    const own = series.statistics.get(statistic.name);
    if (!own)
      return element("p", { class: "muted" }, `${statistic.title}: not measured for this layer.`);
    const curves = [{ ...own, color: theme.curves[0], label: statistic.title }];
    if (statistic.name === "grad_norm" && series.parameters.size > 1) {
      [...series.parameters].slice(0, MAX_CURVES).forEach(([name, curve], i) => {
        curves.push({ ...curve, color: theme.curves[i + 1], label: name.split(".").pop() });
      });
    }
    const canvas = element("canvas", { class: "curve" });
    const width = this.#width();
    const marks = alerts.map((alert) => alert.step);
    const options = { curves, view, theme, width, height: 150, left: 58, log: statistic.log };
    drawChart(canvas, { ...options, cursor: step, marks, axis: true });
    return element(
      "div",
      {},
      element("h3", {}, `${statistic.title} over time`),
      canvas,
      curves.length > 1 ? legendOf(curves) : null,
    );
  }

  #histograms(histograms) {
    const { theme, view, step } = this.shown;
    const options = histograms.map((h) => [`${h.kind} ${h.name}`, `${h.kind}: ${lastPart(h)}`]);
    const found = histograms.find((h) => `${h.kind} ${h.name}` === this.histogramChoice);
    const chosen = found ?? histograms[0];
    const canvas = element("canvas", { class: "histogram" });
    const size = { width: this.#width(), height: 190 };
    const at = drawHistogram(canvas, chosen, { view, theme, step, ...size });
    return element(
      "div",
      {},
      element("h3", {}, "Histogram over time"),
      dropDown("Of", options, `${chosen.kind} ${chosen.name}`, (value) => {
        this.histogramChoice = value;
        this.show(this.shown);
      }),
      canvas,
      element(
        "p",
        { class: "muted" },
        `Bars: step ${formatStep(at)}; TensorBoard keeps ${chosen.steps.length} steps. `,
        `Linear up to ±${formatNumber(chosen.unit)}, logarithmic beyond.`,
      ),
    );
  }

  #images({ source, run, images }) {
    const { step } = this.shown;
    return element(
      "div",
      { class: "pictures" },
      ...images.flatMap(({ kind, name, tag, steps }) => {
        if (!steps.length) return [];
        const nearest = steps[Math.max(columnAt(steps, step ?? Infinity), 0)];
        return [
          element(
            "h3",
            {},
            `${kind.charAt(0).toUpperCase()}${kind.slice(1)}`,
            element("span", { class: "count" }, `step ${formatStep(nearest)}`),
          ),
          element("img", {
            src: source.imageUrl(run, tag, nearest),
            alt: `${kind} of ${name} at step ${nearest}`,
            loading: "lazy",
          }),
        ];
      }),
    );
  }

  #alerts() {
    const { alerts } = this.shown;
    if (!alerts.length) return null;
    const items = [...alerts].sort((a, b) => b.step - a.step);
    return element(
      "div",
      {},
      element("h3", {}, "Alerts of this layer"),
      ...items.map((alert) =>
        element(
          "div",
          { class: `alert ${alert.severity}` },
          ...alertText(alert),
        ),
      ),
    );
  }

  #width() {
    return Math.max((this.node.clientWidth || 360) - 2, 240);
  }
}

function drawSpark(canvas, curve, statistic, view, theme, step) {
  const context = canvas.getContext("2d");
  const [width, height, ratio] = [96, 20, window.devicePixelRatio || 1];
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  canvas.style.width = `${width}px`;
  context.scale(ratio, ratio);
  const scaled = Array.from(curve.values, (value) => {
    if (!Number.isFinite(value) || (statistic.log && value <= 0)) return NaN;
    return statistic.log ? Math.log10(value) : value;
  });
  const finite = scaled.filter((value) => value === value);
  const [low, high] = [
    finite.reduce((a, b) => Math.min(a, b), Infinity),
    finite.reduce((a, b) => Math.max(a, b), -Infinity),
  ];
  const x = (at) => ((at - view.step0) / (view.step1 - view.step0)) * width;
  const y = (value) => height - 2 - ((value - low) / (high - low || 1)) * (height - 4);
  context.strokeStyle = theme.curves[0];
  context.beginPath();
  let pen = false;
  scaled.forEach((value, i) => {
    if (value !== value) pen = false;
    else {
      if (pen) context.lineTo(x(curve.steps[i]), y(value));
      else context.moveTo(x(curve.steps[i]), y(value));
      pen = true;
    }
  });
  context.stroke();
  if (step === null) return;
  context.strokeStyle = theme.muted;
  context.strokeRect(Math.round(x(step)) + 0.5, 0, 0.01, height);
}

function lastPart({ kind, name }) {
  return kind === "parameters" || kind === "gradients" ? name.split(".").pop() : name;
}
