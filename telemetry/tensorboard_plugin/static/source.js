// Questions about runs, and the server that answers them. In a report, `report_page.js` does.

/** Data that this version of the page cannot show. */
export class NewerFormatError extends Error {}

/** Each question is one route of the server. A subclass has `json(route, query)` and `binary(route, query)`. */
export class Source {
  /** Names and last steps of all runs, the newest first. */
  runs = () => this.json("runs");

  /** The same with status, loss, metrics, first alert and hyperparameters. */
  runTable = () => this.json("run_table");

  /** The layers that changed first around a step. */
  onsets = (run, step) => this.json("onsets", { run, step });

  /** Kinds and steps of a layer's pictures. */
  images = (run, layer) => this.json("images", { run, layer });

  /** Layers, statistics and alerts of a run. */
  overview = async (run) => {
    const overview = await this.json("run", { run });
    if (overview.newerFormat) throw new NewerFormatError(overview.newerFormat);
    return overview;
  };

  /**
   * One statistic. `part` may hold `first_step`, `last_step`, `first_layer`, `last_layer`.
   * @returns {Promise<import("./field.js").Field>}
   */
  matrix = (run, statistic, part) => this.binary("matrix", { run, statistic, ...part });

  /** Loss, learning rates, times and memory. */
  scalars = async (run) => items(await this.binary("scalars", { run }), "curves", ["steps", "values"]);

  histograms = async (run, layer) =>
    items(await this.binary("histograms", { run, layer }), "histograms", ["steps", "edges", "shares"]);

  /** All statistics of a layer, and the gradient norm of each of its parameters. */
  layer = async (run, layer) => {
    const found = await this.binary("layer", { run, layer });
    const curve = (prefix) => ({ steps: found[`${prefix}.steps`], values: found[`${prefix}.values`] });
    const [statistics, parameters] = ["statistics", "parameters"].map(
      (group) => new Map(found[group].map((name, i) => [name, curve(`${group}${i}`)])),
    );
    return { statistics, parameters };
  };

  /** Smallest and largest value of each unit, step after step; both are 0 of a dead one. */
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

  /** Where the report of runs is, one HTML file. */
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
