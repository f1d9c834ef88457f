// Starts the page in a report, and serves the data inside of its file.

import { Page } from "./app.js";
import { curveAt, rowOf } from "./field.js";
import { followTheme, onNavigation, readLink, writeLink } from "./host.js";
import { html, render as renderInto } from "./preact.js";
import { RunCurves } from "./run_curves.js";
import { unpack, unpackField, unpackHistograms, unpackScalars } from "./source.js";

export async function render() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.getElementById("telemetry");
  const [run, other] = data.table.map(({ name }) => name);
  const first = data.table.length === 2 ? { run, other, mode: "run" } : { run };
  const read = () => ({ ...first, ...readLink() });
  const page = new Page(root, new EmbeddedSource(data), { read, write: writeLink });
  const losses = document.getElementById("losses");
  let isOpen = true;
  const onToggle = (isNow) => {
    isOpen = isNow;
    page.draw();
  };
  page.drawMore = () =>
    losses && renderInto(html`<${RunCurves} ...${{ page, isOpen, onToggle }} runs=${data.table} isOfLoss />`, losses);
  onNavigation((link) => page.follow(link));
  followTheme((theme) => page.setTheme(theme));
  await page.start();
}

class EmbeddedSource {
  /** @param {Object} data written by `telemetry.tensorboard_plugin.report`; binary parts as base64 of gzip */
  constructor(data) {
    this.data = data;
    this.fields = new Map();
  }

  get isLive() {
    return false;
  }

  async runs() {
    return this.data.table;
  }

  async runTable() {
    return this.data.table;
  }

  /** The layers that changed first; known at the steps of alerts. */
  async onsets(run, step) {
    return this.data.runs[run].onsets[step] ?? { isUnknown: true };
  }

  async overview(run) {
    return this.data.runs[run].overview;
  }

  async matrix(run, statistic) {
    const packed = this.data.runs[run].matrices[statistic];
    if (!this.fields.has(packed)) {
      const field = unpackField(unpack(await inflate(packed)));
      this.fields.set(packed, { ...field, isAll: true });
    }
    return this.fields.get(packed);
  }

  async scalars(run) {
    return unpackScalars(unpack(await inflate(this.data.runs[run].scalars)));
  }

  /** Curves of a layer, cut out of the matrices; those of its parameters are unknown. */
  async layer(run, name) {
    const { overview, matrices } = this.data.runs[run];
    const layer = overview.layers.findIndex((known) => known.name === name);
    const statistics = new Map();
    for (const statistic of Object.keys(matrices)) {
      const field = await this.matrix(run, statistic);
      const curve = curveAt(field.steps, field.values, field.rows, rowOf(field, layer));
      if (curve.steps.length) statistics.set(statistic, curve);
    }
    return { statistics, parameters: null };
  }

  async histograms(run, name) {
    const packed = this.data.runs[run].histograms[name];
    return packed ? unpackHistograms(unpack(await inflate(packed))) : [];
  }

  async images(run, name) {
    return this.data.runs[run].images[name] ?? [];
  }

  imageUrl(run, tag, step) {
    return `data:image/png;base64,${this.data.runs[run].pictures[`${tag} ${step}`]}`;
  }
}

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}
