// Starts the page in a report, and serves the data inside of its file.

import { Page } from "./app.js";
import { curveAt, rowOf } from "./field.js";
import { html, render as renderInto } from "./preact.js";
import { RunCurves } from "./run_curves.js";
import { Source, unpack } from "./source.js";

export async function render() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const [run, other] = data.table.map(({ name }) => name);
  const first = data.table.length === 2 ? { run, other, mode: "run" } : { run };
  const page = new Page(document.getElementById("telemetry"), new EmbeddedSource(data), first);
  const losses = document.getElementById("losses");
  page.drawMore = () =>
    losses && renderInto(html`<${RunCurves} page=${page} runs=${data.table} isOpen isOfLoss />`, losses);
  await page.start();
}

/** Data written by `telemetry.tensorboard_plugin.report`; binary parts as base64 of gzip. */
class EmbeddedSource extends Source {
  isLive = false;
  units = null;
  fields = new Map();

  constructor(data) {
    super();
    this.data = data;
  }

  json = async (route, { run, step, layer } = {}) => {
    if (!run) return this.data.table;
    const { overview, onsets, images } = this.data.runs[run];
    // The layers that changed first are known at the steps of alerts.
    return { run: overview, onsets: onsets[step] ?? { isUnknown: true }, images: images[layer] ?? [] }[route];
  };

  binary = async (route, { run, statistic, layer }) => {
    const { matrices, scalars, histograms } = this.data.runs[run];
    const packed = { matrix: matrices[statistic], scalars, histograms: histograms[layer] }[route];
    return packed ? unpack(await inflate(packed)) : { histograms: [] };
  };

  matrix = async (run, statistic) => {
    const key = JSON.stringify([run, statistic]);
    const read = async () => ({ ...(await this.binary("matrix", { run, statistic })), isAll: true });
    if (!this.fields.has(key)) this.fields.set(key, read());
    return this.fields.get(key);
  };

  /** Curves of a layer, cut out of the matrices; those of its parameters are unknown. */
  layer = async (run, name) => {
    const { overview, matrices } = this.data.runs[run];
    const layer = overview.layers.findIndex((known) => known.name === name);
    const statistics = new Map();
    for (const statistic of Object.keys(matrices)) {
      const field = await this.matrix(run, statistic);
      const curve = curveAt(field.steps, field.values, field.rows, rowOf(field, layer));
      if (curve.steps.length) statistics.set(statistic, curve);
    }
    return { statistics, parameters: null };
  };

  imageUrl = (run, tag, step) => `data:image/png;base64,${this.data.runs[run].pictures[`${tag} ${step}`]}`;
}

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}
