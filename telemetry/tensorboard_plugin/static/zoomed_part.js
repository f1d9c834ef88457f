// Of a field that is thinned out, the part in view with all its cells, as soon as it has come.

const DELAY_MS = 200;

export class ZoomedPart {
  /**
   * @param {Object} source where data comes from
   * @param {string} run
   * @param {Object} on `changed()` when data has come, `failed(error)`
   */
  constructor(source, run, on) {
    this.source = source;
    this.run = run;
    this.on = on;
    this.forget();
  }

  /** What there is no longer counts. */
  forget() {
    this.key = null;
    this.loaded = null;
  }

  /** The part in a view, in full; null as long as it has not come. */
  field(statistic, view, rows) {
    const wanted = partOf(view, rows, statistic);
    if (this.key !== wanted.key) this.#load(statistic, wanted);
    return this.loaded;
  }

  #load(statistic, { key, query }) {
    this.key = key;
    this.loaded = null;
    clearTimeout(this.timer);
    this.timer = setTimeout(async () => {
      try {
        const field = await this.source.matrix(this.run, statistic, query);
        if (this.key === key) this.loaded = field;
        this.on.changed();
      } catch (error) {
        this.on.failed(error);
      }
    }, DELAY_MS);
  }
}

/** Layers and steps behind a view. */
function partOf(view, rows, statistic) {
  const shown = rows.slice(Math.floor(view.row0), Math.ceil(view.row1)).flatMap((r) => r.layers);
  const query = {
    first_step: Math.max(0, Math.floor(view.step0)),
    last_step: Math.max(0, Math.ceil(view.step1)),
    first_layer: shown.reduce((a, b) => Math.min(a, b), Infinity),
    last_layer: shown.reduce((a, b) => Math.max(a, b), 0),
  };
  if (!Number.isFinite(query.first_layer)) query.first_layer = 0;
  return { query, key: `${statistic} ${Object.values(query).join(" ")}` };
}
