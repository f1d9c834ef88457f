// One statistic of a layer, or the loss, in many runs: below the table of runs.

import { drawChart, legendOf, Slots, styleOf } from "./chart.js";
import { withHair } from "./crosshair.js";
import { isLog } from "./curves.js";
import { element, fill } from "./dom.js";
import { aligned } from "./field.js";

const MOST = 20; // runs with distinguishable curves
const HEIGHT = 190;
const DELAY_MS = 200;
const SEED = /seed/i;

export class RunCurves {
  /** See `RunTable`. */
  constructor(source, state, save) {
    this.source = source;
    this.state = state;
    this.summary = element("summary", {});
    this.content = element("div", {});
    const oninput = () => {
      state().smoothing = Number(this.smoothing.value);
      save();
      this.#draw();
    };
    const onchange = () => {
      state().bySeed = this.bySeed.checked;
      save();
      this.#draw();
    };
    this.smoothing = element("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: 0, oninput });
    this.bySeed = element("input", { type: "checkbox", onchange });
    this.seeds = element("label", {}, this.bySeed, "Group by seed (mean, and range as a band)");
    const controls = element("p", { class: "controls" }, element("label", {}, "Smoothing", this.smoothing), this.seeds);
    this.node = element("details", { class: "below-runs run-curves" }, this.summary, controls, this.content);
    this.node.addEventListener("toggle", () => this.#loadSoon());
    this.slots = new Slots();
    this.known = new Map();
    this.wanted = [];
  }

  /**
   * @param {Object[]} runs rows of the table
   * @param {Object} about `layer` or null, `statistic`, `theme`
   */
  show(runs, about) {
    const { layer, statistic } = about;
    this.about = about;
    this.smoothing.value = this.state().smoothing;
    this.bySeed.checked = this.state().bySeed;
    this.wanted = runs.slice(0, MOST);
    this.seeds.hidden = !runs.some(({ hparams }) => Object.keys(hparams ?? {}).some((name) => SEED.test(name)));
    const what = layer === null ? "Loss" : `${statistic.title} of ${layer || "the model"}`;
    const first = runs.length > MOST ? `the first ${MOST} of ` : "";
    this.summary.textContent = `${what} of ${first}${runs.length} run${runs.length === 1 ? "" : "s"}`;
    this.#loadSoon();
  }

  /** Draws at once: a printed page is not drawn again. */
  setTheme(theme) {
    this.about.theme = theme;
    this.#draw();
  }

  #loadSoon() {
    clearTimeout(this.timer);
    if (this.node.open) this.timer = setTimeout(() => this.#load(), DELAY_MS);
  }

  async #load() {
    const { wanted, about } = this;
    const found = await Promise.all(wanted.map(({ name }) => this.#curve(name, about)));
    if (wanted !== this.wanted) return;
    this.found = wanted.map((run, i) => ({ run, ...found[i] })).filter(({ steps }) => steps?.length);
    this.#draw();
  }

  #draw() {
    if (!this.found) return;
    const { theme } = this.about;
    const { smoothing, bySeed } = this.state();
    const grouped = bySeed && !this.seeds.hidden;
    const lines = grouped ? groupsOf(this.found) : this.found.map((curve) => ({ ...curve, label: curve.run.name }));
    const indices = this.slots.assign(lines.map(({ label }) => label));
    const curves = lines.map((curve, i) => smoothed({ ...curve, ...styleOf(theme, indices[i]) }, smoothing));
    const canvas = element("canvas", { role: "img", "aria-label": this.summary.textContent });
    fill(this.content, withHair(canvas), curves.length ? legendOf(curves) : "Not measured in these runs.");
    const end = Math.max(1, ...curves.map(({ steps }) => steps[steps.length - 1] + 1));
    const width = Math.max(this.content.clientWidth - 4, 240);
    const view = { step0: 0, step1: end };
    drawChart(canvas, { curves, view, theme, width, height: HEIGHT, left: 58, log: isLog(curves), axis: true });
    canvas.plotted.click = () => {};
  }

  /** The curve of a run; null without the layer, or if it cannot be read. */
  #curve(run, { layer, statistic }) {
    const key = JSON.stringify([run, layer, layer === null || statistic.name]);
    const read = async () => {
      if (layer === null) return (await this.source.scalars(run)).find(({ kind }) => kind === "loss");
      const { layers } = await this.source.overview(run);
      if (!layers.some(({ name }) => name === layer)) return null;
      return (await this.source.layer(run, layer)).statistics.get(statistic.name);
    };
    if (!this.known.has(key)) this.known.set(key, read().catch(() => null));
    return this.known.get(key);
  }

  forget() {
    this.known.clear();
    this.found = null;
  }
}

/** Runs that differ in nothing but the seed, each group with its mean and range at every common step. */
function groupsOf(found) {
  const rest = ({ hparams }) => Object.entries(hparams ?? {}).filter(([name]) => !SEED.test(name));
  const all = found.map(({ run }) => Object.fromEntries(rest(run)));
  const isShared = ([name, value]) => all.every((values) => values[name] === value);
  const groups = Map.groupBy(found, ({ run }) => JSON.stringify(rest(run)));
  return [...groups.values()].map((members) => {
    const [{ run }] = members;
    const { steps, at } = aligned(members);
    const values = at.map((of) => of.reduce((sum, value) => sum + value, 0) / of.length);
    const band = [at.map((of) => Math.min(...of)), at.map((of) => Math.max(...of))];
    const differing = rest(run).filter((pair) => !isShared(pair)).map((pair) => pair.join("="));
    const label = `${differing.join(" ") || run.name} (${members.length} run${members.length === 1 ? "" : "s"})`;
    return { steps, values, band: members.length > 1 ? band : null, label };
  });
}

/** The exponential moving average of a curve, corrected for its start; the curve itself is behind it. */
function smoothed(curve, weight) {
  if (!weight) return curve;
  const average = (values) => {
    let [sum, share] = [0, 0];
    return Array.from(values, (value) => {
      if (!Number.isFinite(value)) return value;
      sum = weight * sum + (1 - weight) * value;
      share = weight * share + 1 - weight;
      return sum / share;
    });
  };
  return { ...curve, values: average(curve.values), band: curve.band?.map(average), raw: curve.band ? null : curve.values };
}
