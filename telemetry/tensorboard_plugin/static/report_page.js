// Starts the page in a report, and serves the data inside of its file.

import { App } from "./app.js";
import { followTheme, onNavigation, readLink, writeLink } from "./host.js";
import { rowOf } from "./field.js";
import { unpack, unpackField, unpackHistograms, unpackScalars } from "./source.js";

export async function render() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.getElementById("telemetry");
  const app = new App(root, new EmbeddedSource(data), { read: readLink, write: writeLink });
  onNavigation((link) => app.follow(link));
  followTheme((theme) => app.setTheme(theme));
  await app.start();
}

export class EmbeddedSource {
  /** @param {Object} data written by `telemetry.tensorboard_plugin.report`; binary parts as base64 of gzip */
  constructor(data) {
    this.data = data;
    this.fields = new Map();
  }

  get isLive() {
    return false;
  }

  async runs() {
    return [{ name: this.data.run, lastStep: this.data.overview.lastStep }];
  }

  /** The layers that changed first; known at the steps of alerts. */
  async onsets(_run, step) {
    return this.data.onsets[step] ?? { isUnknown: true };
  }

  async overview() {
    return this.data.overview;
  }

  async matrix(_run, statistic) {
    if (!this.fields.has(statistic)) {
      const field = unpackField(unpack(await inflate(this.data.matrices[statistic])));
      this.fields.set(statistic, { ...field, isAll: true });
    }
    return this.fields.get(statistic);
  }

  async scalars() {
    return unpackScalars(unpack(await inflate(this.data.scalars)));
  }

  /** Curves of a layer, cut out of the matrices; those of its parameters are unknown. */
  async layer(run, name) {
    const { layers } = this.data.overview;
    const layer = layers.findIndex((known) => known.name === name);
    const statistics = new Map();
    for (const statistic of Object.keys(this.data.matrices)) {
      const field = await this.matrix(run, statistic);
      const curve = curveOf(field, rowOf(field, layer));
      if (curve.steps.length) statistics.set(statistic, curve);
    }
    return { statistics, parameters: null };
  }

  async histograms(_run, name) {
    const packed = this.data.histograms[name];
    return packed ? unpackHistograms(unpack(await inflate(packed))) : [];
  }

  async images(_run, name) {
    return this.data.images[name] ?? [];
  }

  imageUrl(_run, tag, step) {
    return `data:image/png;base64,${this.data.pictures[`${tag} ${step}`]}`;
  }
}

function curveOf(field, row) {
  const [steps, values] = [[], []];
  field.steps.forEach((step, column) => {
    const value = row < 0 ? -1 : field.values[column * field.rows + row];
    if (value < 0) return;
    steps.push(step);
    values.push(value);
  });
  return { steps, values };
}

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}
