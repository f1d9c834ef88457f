// Questions about runs, which the server answers, or in a report the data inside of its file.

import { curveAt, rowOf } from "./field.js";

/**
 * Each question is one route of the server, whose functions say what the answers have. A subclass has
 * `json(route, query)` and `binary(route, query)`.
 */
export class Source {
  runs = () => this.json("runs");
  onsets = (run, step) => this.json("onsets", { run, step });
  images = (run, layer) => this.json("images", { run, layer });
  overview = (run) => this.json("run", { run });

  /** The field of one statistic. `part` may hold `first_step`, `last_step`, `first_layer`, `last_layer`. */
  matrix = (run, statistic, part) => this.binary("matrix", { run, statistic, ...part });

  scalars = async (run) => items(await this.binary("scalars", { run }), "curves", ["steps", "values"]);

  histograms = async (run, layer) =>
    items(await this.binary("histograms", { run, layer }), "histograms", ["steps", "edges", "shares"]);

  layer = async (run, layer) => {
    const found = await this.binary("layer", { run, layer });
    const curve = (prefix) => ({ steps: found[`${prefix}.steps`], values: found[`${prefix}.values`] });
    const [statistics, parameters] = ["statistics", "parameters"].map(
      (group) => new Map(found[group].map((name, i) => [name, curve(`${group}${i}`)])),
    );
    return { statistics, parameters };
  };

  units = async (run, layer) => {
    const found = await this.binary("units", { run, layer });
    return { ...found, count: found.arrays.extremes.shape[1] };
  };
}

export class ServerSource extends Source {
  root = new URL("../", import.meta.url);
  isLive = true; // there may be more when asked again

  json = async (route, query) => (await this.#get(route, query)).json();

  binary = async (route, query) => unpack(await (await this.#get(route, query)).arrayBuffer());

  reportUrl = (runs) => this.#url("report", runs.map((run) => ["run", run]));

  imageUrl = (run, tag, step) => this.#url("image", { run, tag, step });

  async #get(route, query) {
    const response = await fetch(this.#url(route, query));
    if (response.ok) return response;
    const answer = await response.json().catch(() => ({}));
    throw new Error(answer.error ?? `the server answered ${response.status}`);
  }

  #url(route, query) {
    const url = new URL(route, this.root);
    url.search = new URLSearchParams(query);
    return url.href;
  }
}

/** Data written by `telemetry.tensorboard_plugin.report`; binary parts as base64 of gzip. */
export class EmbeddedSource extends Source {
  isLive = false;
  units = async () => null;
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

/** Header and arrays of an answer that `payloads.pack` made, by name. */
export function unpack(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const arrays = Object.entries(header.arrays).map(([name, { type, shape, offset }]) => {
    const size = shape.reduce((product, extent) => product * extent, 1);
    const Type = type === "f8" ? Float64Array : Float32Array;
    return [name, new Type(buffer, 8 + length + offset, size)];
  });
  return { ...header, ...Object.fromEntries(arrays) };
}

/** The items of an answer, each with its arrays. */
function items(found, name, keys) {
  return found[name].map((item, i) => ({ ...item, ...Object.fromEntries(keys.map((key) => [key, found[key + i]])) }));
}
