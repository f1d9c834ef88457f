// Questions about runs, which the server answers, or in a report the data inside of its file.

import { curveAt, rowOf } from "./field.js";

/**
 * Each question is one route of the server, whose functions say what the answers have. A subclass has
 * `ask(route, query)`, the answer as a `Response`; null in a report without it.
 */
class Source {
  runs = () => this.#json("runs", {});
  overview = (run) => this.#json("run", { run });
  onsets = (run, step) => this.#json("onsets", { run, step });
  images = (run, layer) => this.#json("images", { run, layer });
  units = (run, layer) => this.#arrays("units", { run, layer });
  scalars = (run) => this.#items("scalars", { run }, "curves", ["steps", "values"]);
  histograms = (run, layer) => this.#items("histograms", { run, layer }, "histograms", ["steps", "edges", "shares"]);

  /** The field of one statistic. `part` may hold `first_step`, `last_step`, `first_layer`, `last_layer`. */
  matrix(run, statistic, part) {
    return this.#arrays("matrix", { run, statistic, ...part });
  }

  async layer(run, layer) {
    const found = await this.#arrays("layer", { run, layer });
    const curve = (prefix) => ({ steps: found[`${prefix}.steps`], values: found[`${prefix}.values`] });
    const [statistics, parameters] = ["statistics", "parameters"].map(
      (group) => new Map(found[group].map((name, i) => [name, curve(`${group}${i}`)])),
    );
    return { statistics, parameters };
  }

  async #json(route, query) {
    return (await this.ask(route, query))?.json();
  }

  async #arrays(route, query) {
    const answer = await this.ask(route, query);
    return answer && unpack(await answer.arrayBuffer());
  }

  /** The items of an answer, each with its arrays. */
  async #items(route, query, name, keys) {
    const found = await this.#arrays(route, query);
    const arraysOf = (_, i) => Object.fromEntries(keys.map((key) => [key, found[key + i]]));
    return found?.[name].map((item, i) => ({ ...item, ...arraysOf(item, i) })) ?? [];
  }
}

export class ServerSource extends Source {
  root = new URL("../", import.meta.url);
  isLive = true; // there may be more when asked again

  reportUrl = (runs) => this.#url("report", runs.map((run) => ["run", run]));

  imageUrl = (run, tag, step) => this.#url("image", { run, tag, step });

  async ask(route, query) {
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

/** Answers in a file that `telemetry.tensorboard_plugin.report` wrote: base64 of gzip, by route and query. */
export class EmbeddedSource extends Source {
  isLive = false;
  #fields = new Map();

  /** @param {Object} data `answers`, and `pictures`, which are PNG files in base64 */
  constructor(data) {
    super();
    Object.assign(this, data);
  }

  imageUrl = (...query) => `data:image/png;base64,${this.pictures[query.join("\n")]}`;

  async ask(route, query) {
    const packed = this.answers[[route, ...Object.values(query)].join("\n")];
    if (!packed) return null;
    const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip")));
  }

  /** There is one field of a statistic, without parts. */
  matrix(run, statistic) {
    const key = `${run}\n${statistic}`;
    if (!this.#fields.has(key)) this.#fields.set(key, super.matrix(run, statistic));
    return this.#fields.get(key);
  }

  /** Curves of a layer, cut out of the fields; those of its parameters are unknown. */
  async layer(run, name) {
    const { layers, statistics: known } = await this.overview(run);
    const layer = layers.findIndex((one) => one.name === name);
    const statistics = new Map();
    for (const { name: statistic } of known) {
      const field = await this.matrix(run, statistic);
      const curve = curveAt(field.steps, field.values, field.rows, rowOf(field, layer));
      if (curve.steps.length) statistics.set(statistic, curve);
    }
    return { statistics, parameters: null };
  }
}

/** Header and arrays of an answer that `payloads.pack` made, by name. */
function unpack(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const arrays = Object.entries(header.arrays).map(([name, { type, shape, offset }]) => {
    const size = shape.reduce((product, extent) => product * extent, 1);
    const Type = type === "f8" ? Float64Array : Float32Array;
    return [name, new Type(buffer, 8 + length + offset, size)];
  });
  return { ...header, ...Object.fromEntries(arrays) };
}
