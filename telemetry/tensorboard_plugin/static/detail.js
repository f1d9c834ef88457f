// Everything about one layer: its statistics at a step and over time, histograms, pictures, alerts.

import { alertTitle } from "./alert_list.js";
import { drawChart, legendOf, styleOf } from "./chart.js";
import { withHair } from "./crosshair.js";
import { axisOf } from "./curves.js";
import { dropDown, element, fill } from "./dom.js";
import { columnAt } from "./field.js";
import { formatNumber, formatStep, formatValue } from "./format.js";
import { drawHistogram, quantilesOf, shareOfZeros } from "./histogram.js";
import { enlarged, filmOf } from "./pictures.js";
import { titleOf } from "./rows.js";
import { makeScale } from "./scale.js";
import { drawUnits, unitsText } from "./units.js";

const MAX_CURVES = 4;
const CONVOLUTION = /^Conv/;
const KEPT_PICTURES = 10; // by default
const QUANTILES = [0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99];

export class Detail {
  /**
   * @param {Object} on `close()`, `layer(name)`, `move(steps)`, `statistic(name)`, `alert(alert)`,
   *   `histogram(choice)`, `onsets()` or null
   * @param {import("./large.js").Large} large
   */
  constructor(on, large) {
    this.on = on;
    this.large = large;
    this.node = element("section", { class: "detail", "aria-label": "Layer" });
    this.data = null;
    this.request = 0;
  }

  /** Whether it shows, or loads, a layer of a run. */
  isOf(run, name) {
    return this.asked?.name === name && this.asked.run === run;
  }

  /**
   * Loads the data of a layer; answers to earlier requests are ignored.
   * @param {string[]} runs all that are shown and have the layer; histograms are those of `run`
   */
  async load(source, run, runs, layer) {
    const request = ++this.request;
    this.data = null;
    this.asked = { run, name: layer.name };
    const parts = await Promise.allSettled([
      source.histograms(run, layer.name),
      source.images(run, layer.name),
      source.units?.(run, layer.name),
      ...runs.map((name) => source.layer(name, layer.name)),
    ]);
    if (request !== this.request) return;
    const [histograms, images, units, ...groups] = parts.map((part) => part.value ?? null);
    const error = parts.find((part) => part.status === "rejected")?.reason?.message;
    const series = new Map(runs.map((name, i) => [name, groups[i]]));
    this.data = { source, run, series, histograms, images, units, error };
  }

  /**
   * @param {Object} shown `run` (of the last click), `runs` (all of them), `layer`, `step`,
   *   `layers` (of its run), `statistic`, `statistics`, `view`, `alerts`, `histogram` (which was chosen), `hasSteps`, `theme`
   */
  show(shown) {
    this.shown = shown;
    const { run, runs, layer } = shown;
    const data = this.isOf(run, layer.name) ? this.data : null;
    const groups = runs.map((name) => data?.series.get(name) ?? null);
    const isKnown = groups.some(Boolean);
    fill(
      this.node,
      this.#heading(),
      shown.hasSteps ? untrainedNote(layer, groups[runs.indexOf(run)]) : null,
      data ? null : element("p", { class: "muted" }, "Loading…"),
      data?.error ? element("p", { class: "failure" }, data.error) : null,
      data?.histograms?.length ? this.#histograms(data.histograms) : null,
      ...(data?.images ?? []).map((picture) => this.#pictures(data, picture)),
      data?.units?.count ? this.#units(data.units) : null,
      isKnown ? this.#curves(groups) : null,
      isKnown ? this.#table(groups) : null,
      data?.images?.length === 0 && CONVOLUTION.test(layer.type)
        ? this.#nearestPictures()
        : null,
    );
    for (const frame of this.node.querySelectorAll(".film [aria-current]"))
      frame.parentNode.scrollLeft = frame.offsetLeft - frame.parentNode.offsetLeft - frame.offsetWidth;
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
    const { run, runs, layer, step, alerts } = this.shown;
    const shapes = layer.parameters
      .map((p) => `${p.name.split(".").pop()} ${p.shape.join("×") || "scalar"}`)
      .join(", ");
    const button = (text, title, onclick) =>
      element("button", { title, "aria-label": title, dataset: { key: title }, onclick }, text);
    return element(
      "header",
      {},
      element("h2", {}, titleOf(layer), button("✕", "Close (Esc)", () => this.on.close())),
      runs.length > 1
        ? element("p", { class: "run-name" }, letter(runs.indexOf(run)), ` ${run}`)
        : null,
      element("p", { class: "muted" }, [layer.type, shapes].filter(Boolean).join(" · ")),
      layer.code ? element("p", { class: "muted code" }, `forward: ${layer.code}`) : null,
      ...alerts.map((alert) => this.#alert(alert)),
      element(
        "p",
        { class: "step-navigation" },
        button("‹", "Previous measured step (←)", () => this.on.move(-1)),
        element("b", {}, step === null ? "no step chosen" : `step ${formatStep(step)}`),
        button("›", "Next measured step (→)", () => this.on.move(1)),
        this.on.onsets && step !== null
          ? element("button", { class: "wide", dataset: { key: "onsets" }, onclick: this.on.onsets }, "Which layers changed first?")
          : null,
      ),
    );
  }

  /** A button that selects an alert of the layer, or an alert that has a consequence in it. */
  #alert(alert) {
    const { name } = this.shown.layer;
    const isCause = alert.consequences.some((known) => known.module_name === name) && alert.module_name !== name;
    return element(
      "button",
      { class: `first-alert ${alert.severity} to-alert`, onclick: () => this.on.alert(alert) },
      `${isCause ? "Caused by: " : ""}${alertTitle(alert)}, step ${formatStep(alert.step)}`,
    );
  }

  /** Each statistic with its value in each run and a small curve; statistics of other steps come last. */
  #table(groups) {
    const { statistics, statistic, step, theme, view } = this.shown;
    const has = ({ name }) => groups.some((group) => group?.statistics.has(name));
    let before = formatStep(step ?? 0);
    const row = (known) => {
      const curves = groups.map((group) => group?.statistics.get(known.name));
      const columns = curves.map((curve) => (curve ? columnAt(curve.steps, step ?? Infinity) : -1));
      const values = columns.map((column, i) => (column < 0 ? -1 : curves[i].values[column]));
      // Most statistics are measured at some steps only: these are values of the last such step.
      const steps = columns.flatMap((column, i) => (column < 0 ? [] : [formatStep(curves[i].steps[column])]));
      const at = (step !== null && [...new Set(steps)].join(" and ")) || before;
      const heading = at === before ? [] : [ofStep(at, groups.length + 2)];
      before = at;
      const canvas = element("canvas", {});
      drawSpark(canvas, curves, known, view, theme, step);
      const name = {
        dataset: { key: `statistic ${known.name}` },
        onclick: () => this.on.statistic(known.name),
      };
      const line = element(
        "tr",
        { class: known.name === statistic.name ? "chosen" : "" },
        element("th", { scope: "row", title: known.description }, element("button", name, known.title)),
        ...values.map((value) =>
          element("td", { class: Number.isFinite(value) ? "number" : "number nonfinite" }, formatValue(known, value)),
        ),
        element("td", {}, canvas),
      );
      return [...heading, line];
    };
    const head = ["", ...groups.map((_, i) => letter(i)), ""];
    const cells = head.map((text) => element("td", { class: "number" }, text));
    return element(
      "table",
      { class: "statistics" },
      groups.length > 1 ? element("thead", {}, element("tr", {}, ...cells)) : null,
      element("tbody", {}, ...statistics.filter(has).flatMap(row)),
    );
  }

  #curves(groups) {
    const { runs, statistic, theme, view, step, alerts } = this.shown;
    const named = groups.map((group, i) => [runs[i], group?.statistics.get(statistic.name)]);
    if (!named.some(([, curve]) => curve))
      return element("p", { class: "muted" }, `${statistic.title}: not measured for this layer.`);
    if (groups.length === 1) {
      named[0][0] = statistic.title;
      const parameters = [...(groups[0].parameters ?? [])].slice(0, MAX_CURVES);
      if (statistic.name === "grad_norm" && parameters.length > 1)
        named.push(...parameters.map(([name, curve]) => [name.split(".").pop(), curve]));
    }
    const curves = named
      .map(([label, curve], i) => ({ ...curve, ...styleOf(theme, i), label }))
      .filter(({ steps }) => steps);
    const canvas = element("canvas", { class: "curve" });
    drawChart(canvas, {
      curves,
      view,
      theme,
      width: this.#width(),
      height: 150,
      left: 58,
      ...axisOf(statistic, makeScale(statistic, "value", curves.map(({ values }) => values))),
      cursor: step,
      marks: alerts.map((alert) => alert.step),
      axis: true,
    });
    return element(
      "div",
      {},
      element("h3", {}, `${statistic.title} over time`),
      withHair(canvas),
      curves.length > 1 ? legendOf(curves) : null,
    );
  }

  #units(units) {
    const { theme, view, step } = this.shown;
    const canvas = element("canvas", { role: "img", "aria-label": "Units over time" });
    const index = drawUnits(canvas, units, { view, theme, width: this.#width(), step });
    return element(
      "div",
      { class: "units" },
      element("h3", {}, "Largest magnitude of each unit"),
      withHair(canvas),
      element("p", { class: "muted" }, unitsText(units, index)),
    );
  }

  #histograms(histograms) {
    const { theme, view, step, histogram } = this.shown;
    const keyOf = ({ kind, name }) => `${kind} ${name}`;
    const options = histograms.map((h) => [keyOf(h), `${h.kind}: ${lastPart(h)}`]);
    const chosen = histograms.find((known) => keyOf(known) === histogram) ?? histograms[0];
    const canvas = element("canvas", { class: "histogram" });
    const width = this.#width();
    const at = drawHistogram(canvas, chosen, { view, theme, width, height: 180, step });
    const enlarge = () => {
      const title = `${capital(chosen.kind)} of ${chosen.name}`;
      const index = Math.max(columnAt(chosen.steps, step ?? Infinity), 0);
      this.large.open(title, chosen.steps, index, (...of) => largeHistogram(chosen, theme, ...of));
    };
    canvas.plotted.click = enlarge;
    return element(
      "div",
      {},
      element("h3", {}, "Histogram over time", enlargeButton(enlarge)),
      dropDown("Of", options, keyOf(chosen), (value) => this.on.histogram(value)),
      withHair(canvas),
      element(
        "p",
        { class: "muted" },
        `Lines: median, 5 % and 95 %. Bars: step ${formatStep(at)}, one of ${chosen.steps.length}. `,
        `Linear up to ±${formatNumber(chosen.unit)}, logarithmic beyond. `,
        zeroText(chosen, at),
      ),
    );
  }

  /** A way to the layer with pictures that is nearest in forward order. */
  #nearestPictures() {
    const { layer, layers } = this.shown;
    const at = layers.indexOf(layer);
    const distance = (other) => Math.abs(layers.indexOf(other) - at);
    const [nearest] = layers.filter(({ hasPictures }) => hasPictures).sort((a, b) => distance(a) - distance(b));
    if (!nearest) return element("p", { class: "muted" }, "No layer of this run has pictures.");
    const onclick = () => this.on.layer(nearest.name);
    return element("p", { class: "muted" }, "Nearest layer with pictures: ", element("button", { class: "run-link", onclick }, titleOf(nearest)));
  }

  #pictures({ source, run }, picture) {
    const { kind, name, tag, steps } = picture;
    if (!steps.length) return null;
    const nearest = Math.max(columnAt(steps, this.shown.step ?? Infinity), 0);
    const urlOf = (step) => source.imageUrl(run, tag, step);
    const weight = this.shown.layer.parameters.find(({ shape }) => shape.length > 2);
    const least = kind === "filters" ? weight?.shape[0] : 0; // those of one pixel may be gray
    const enlarge = (index) =>
      this.large.open(`${capital(kind)} of ${name}`, steps, index, (at, width, height) => [
        enlarged(urlOf(steps[at]), `${kind} at step ${steps[at]}`, width, height, least),
        kind === "input"
          ? null
          : element("p", { class: "muted" }, "Channel numbers"),
      ]);
    return element(
      "div",
      { class: "pictures" },
      element("h3", {}, capital(kind), enlargeButton(() => enlarge(nearest))),
      filmOf(picture, nearest, urlOf, enlarge),
      source.isLive && steps.length === KEPT_PICTURES
        ? element("p", { class: "muted" }, `TensorBoard keeps ${KEPT_PICTURES} steps of a picture, more with --samples_per_plugin images=100.`)
        : null,
    );
  }

  #width() {
    return Math.max((this.node.clientWidth || 360) - 2, 240);
  }
}

const STATES = {
  frozen: ["Frozen", "requires_grad is False."],
  "not in an optimizer": ["Not in an optimizer", "no optimizer that stepped has these parameters."],
  "no gradient": ["No gradient", "backward() did not reach it at the last full step."],
  "learning rate 0": ["Learning rate 0", "that of its parameter group at the last full step."],
};

/** Why a layer does not train, or which of its parameters have had no gradient at any step; else null. */
function untrainedNote({ parameters, state }, group) {
  const note = (head, text) => element("p", { class: "frozen" }, element("b", {}, `${head}: `), text);
  if (STATES[state]) return note(...STATES[state]);
  if (!group?.parameters) return null;
  const short = ({ name }) => name.split(".").pop();
  const without = parameters.filter(({ name }) => !group.parameters.has(name)).map(short);
  const others = parameters.filter(({ name }) => group.parameters.has(name)).map(short);
  if (!without.length) return null;
  const of = others.length ? `. Gradients and update ratio are those of ${others.join(", ")}.` : "";
  return note("No gradient at any step", without.join(", ") + of);
}

/** A row of the table that says at which step those below it were measured. */
function ofStep(step, colspan) {
  return element("tr", {}, element("td", { class: "of-step muted", colspan }, `measured at step ${step}`));
}

/** A histogram over all its steps, the bars of one, and that one's quantiles. */
function largeHistogram(histogram, theme, index, width, height) {
  const canvas = element("canvas", {});
  const { steps } = histogram;
  const view = { step0: steps[0], step1: Math.max(steps[steps.length - 1], steps[0] + 1) };
  drawHistogram(canvas, histogram, { view, theme, width, height, step: steps[index] });
  const values = quantilesOf(histogram, index, QUANTILES);
  const cells = (tag, texts) =>
    element("tr", {}, ...texts.map((text) => element(tag, { class: "number" }, text)));
  return [
    withHair(canvas),
    element("p", { class: "muted" }, zeroText(histogram, steps[index])),
    element(
      "table",
      { class: "quantiles" },
      cells("th", ["share below", ...QUANTILES.map((share) => `${formatNumber(100 * share)} %`)]),
      cells("td", ["value", ...values.map(formatNumber)]),
    ),
  ];
}

/** The share of a step's values that are exactly zero, drawn as a separate bar; "" without any. */
function zeroText(histogram, step) {
  const share = shareOfZeros(histogram, histogram.steps.indexOf(step));
  return share > 0 ? `Exactly zero: ${formatNumber(100 * share)} %, a separate bar.` : "";
}

function enlargeButton(onclick) {
  return element("button", { class: "enlarge", onclick }, "Enlarge");
}

/** The letter of one of two runs, in its color. */
export function letter(index) {
  return element("b", { class: `letter letter${index}` }, "AB"[index]);
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

function drawSpark(canvas, curves, statistic, view, theme, step) {
  const context = canvas.getContext("2d");
  const [width, height, ratio] = [curves.length > 1 ? 64 : 96, 20, window.devicePixelRatio || 1];
  [canvas.width, canvas.height] = [width * ratio, height * ratio];
  canvas.style.width = `${width}px`;
  context.scale(ratio, ratio);
  const scaledOf = (value) => {
    if (!Number.isFinite(value) || (statistic.log && value <= 0)) return NaN;
    return statistic.log ? Math.log10(value) : value;
  };
  const known = curves.filter(Boolean);
  const scaled = known.map(({ values }) => Array.from(values, scaledOf));
  const finite = scaled.flat().filter((value) => value === value);
  const low = finite.reduce((a, b) => Math.min(a, b), Infinity);
  const high = finite.reduce((a, b) => Math.max(a, b), -Infinity);
  const x = (at) => ((at - view.step0) / (view.step1 - view.step0)) * width;
  const y = (value) => height - 2 - ((value - low) / (high - low || 1)) * (height - 4);
  known.forEach(({ steps }, number) => {
    context.strokeStyle = theme.curves[curves.indexOf(known[number])];
    context.beginPath();
    scaled[number].forEach((value, i) => {
      const isNew = !(scaled[number][i - 1] === scaled[number][i - 1]) || i === 0;
      if (value === value) context[isNew ? "moveTo" : "lineTo"](x(steps[i]), y(value));
    });
    context.stroke();
  });
  if (step === null) return;
  context.strokeStyle = theme.muted;
  context.strokeRect(Math.round(x(step)) + 0.5, 0, 0.01, height);
}

function lastPart({ kind, name }) {
  return kind === "parameters" || kind === "gradients" ? name.split(".").pop() : name;
}
