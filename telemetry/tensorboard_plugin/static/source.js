// Asks the server for data. `report_page.js` answers the same questions from within a page.

/** Data that this version of the page cannot show. */
export class NewerFormatError extends Error {}

export class ServerSource {
  constructor() {
    this.root = new URL("../", import.meta.url);
  }

  /** Whether there may be more when asked again. */
  get isLive() {
    return true;
  }

  /** Names and last steps of all runs, the newest first. */
  runs = () => this.#json("runs", {});

  /** The same with status, loss, metrics, first alert and hyperparameters. */
  runTable = () => this.#json("run_table", {});

  /** The layers that changed first around a step. */
  onsets = (run, step) => this.#json("onsets", { run, step });

  /** Layers, statistics and alerts of a run. */
  async overview(run) {
    const overview = await this.#json("run", { run });
    if (overview.newerFormat) throw new NewerFormatError(overview.newerFormat);
    return overview;
  }

  /**
   * One statistic. `part` may hold `first_step`, `last_step`, `first_layer`, `last_layer`.
   * @returns {Promise<import("./field.js").Field>}
   */
  matrix = async (run, statistic, part = {}) => unpackField(await this.#binary("matrix", { run, statistic, ...part }));

  scalars = async (run) => unpackScalars(await this.#binary("scalars", { run }));

  layer = async (run, layer) => unpackLayer(await this.#binary("layer", { run, layer }));

  histograms = async (run, layer) => unpackHistograms(await this.#binary("histograms", { run, layer }));

  units = async (run, layer) => unpackUnits(await this.#binary("units", { run, layer }));

  images = (run, layer) => this.#json("images", { run, layer });

  /** Where the report of runs is, one HTML file. */
  reportUrl(runs) {
    const url = this.#url("report", {});
    for (const run of runs) url.searchParams.append("run", run);
    return url.href;
  }

  imageUrl(run, tag, step) {
    return this.#url("image", { run, tag, step }).href;
  }

  async #json(route, query) {
    return (await this.#get(route, query)).json();
  }

  async #binary(route, query) {
    return unpack(await (await this.#get(route, query)).arrayBuffer());
  }

  async #get(route, query) {
    const response = await fetch(this.#url(route, query));
    if (!response.ok) {
      const answer = await response.json().catch(() => ({}));
      throw new Error(answer.error ?? `the server answered ${response.status}`);
    }
    return response;
  }

  #url(route, query) {
    const url = new URL(route, this.root);
    for (const [name, value] of Object.entries(query)) url.searchParams.set(name, value);
    return url;
  }
}

/** Header and arrays of an answer that `payloads.pack` made. */
export function unpack(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const arrays = {};
  for (const [name, { type, shape, offset }] of Object.entries(header.arrays)) {
    const size = shape.reduce((product, extent) => product * extent, 1);
    const Type = type === "f8" ? Float64Array : Float32Array;
    arrays[name] = new Type(buffer, 8 + length + offset, size);
  }
  return { header, arrays };
}

export function unpackField({ header, arrays }) {
  return { ...header, steps: arrays.steps, values: arrays.values };
}

export function unpackScalars({ header, arrays }) {
  return header.curves.map((curve, i) => ({
    ...curve,
    steps: arrays[`steps${i}`],
    values: arrays[`values${i}`],
  }));
}

function unpackLayer({ header, arrays }) {
  const curves = (group) =>
    new Map(
      header[group].map((name, i) => [
        name,
        { steps: arrays[`${group}${i}.steps`], values: arrays[`${group}${i}.values`] },
      ]),
    );
  return { statistics: curves("statistics"), parameters: curves("parameters") };
}

/** Smallest and largest value of each unit, step after step; both are 0 of a dead one. */
function unpackUnits({ header, arrays }) {
  const { steps, extremes } = arrays;
  return { ...header, steps, extremes, count: header.arrays.extremes.shape[1] };
}

export function unpackHistograms({ header, arrays }) {
  return header.histograms.map((histogram, i) => ({
    ...histogram,
    steps: arrays[`steps${i}`],
    edges: arrays[`edges${i}`],
    shares: arrays[`shares${i}`],
  }));
}
