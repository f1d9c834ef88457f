// One statistic of a layer, or the loss, in many runs: below the table of runs.

import { drawChart, legendOf, styleOf } from "./chart.js";
import { withHair } from "./crosshair.js";
import { isLog } from "./curves.js";
import { element, fill } from "./dom.js";

const MOST = 20; // runs; so many curves can be told apart
const HEIGHT = 190;
const DELAY_MS = 200;

export class RunCurves {
  /** @param {Object} source */
  constructor(source) {
    this.source = source;
    this.summary = element("summary", {});
    this.content = element("div", {});
    this.node = element("details", { class: "below-runs run-curves" }, this.summary, this.content);
    this.node.addEventListener("toggle", () => this.#loadSoon());
    this.known = new Map();
    this.wanted = [];
  }

  /**
   * @param {string[]} runs
   * @param {Object} about `layer` or null, `statistic`, `theme`
   */
  show(runs, about) {
    const { layer, statistic } = about;
    this.about = about;
    this.wanted = runs.slice(0, MOST);
    const what = layer === null ? "Loss" : `${statistic.title} of ${layer || "the model"}`;
    const first = runs.length > MOST ? `the first ${MOST} of ` : "";
    this.summary.textContent = `${what} in ${first}these ${runs.length} runs`;
    this.#loadSoon();
  }

  #loadSoon() {
    clearTimeout(this.timer);
    if (this.node.open) this.timer = setTimeout(() => this.#load(), DELAY_MS);
  }

  async #load() {
    const { wanted, about } = this;
    const found = await Promise.all(wanted.map((run) => this.#curve(run, about)));
    if (wanted !== this.wanted) return;
    const curves = wanted
      .map((run, i) => ({ ...found[i], ...styleOf(about.theme, i), label: run }))
      .filter(({ steps }) => steps?.length);
    const canvas = element("canvas", { role: "img", "aria-label": this.summary.textContent });
    fill(this.content, withHair(canvas), curves.length ? legendOf(curves) : "Not measured in these runs.");
    const end = Math.max(1, ...curves.map(({ steps }) => steps[steps.length - 1] + 1));
    const width = Math.max(this.content.clientWidth - 4, 240);
    const view = { step0: 0, step1: end };
    const { theme } = about;
    drawChart(canvas, { curves, view, theme, width, height: HEIGHT, left: 58, log: isLog(curves), axis: true });
    canvas.plotted.click = () => {};
  }

  /** What a run has; nothing where it has no such layer or cannot be read. */
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
  }
}
