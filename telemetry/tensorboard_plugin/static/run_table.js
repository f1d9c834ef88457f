// The dialog that lists all runs: filters, columns, and which runs are drawn together.

import { dropDown, element, fill } from "./dom.js";
import { Parallel } from "./parallel.js";
import { columnsOf, isMissing, matcher, rankCorrelation } from "./run_columns.js";
import { RunCurves } from "./run_curves.js";

// Names of metrics that are measured on other data than those of training.
const VALIDATION = /(^|[^a-z])(val|valid|validation|eval|dev|test)([^a-z]|$)/i;
const collator = new Intl.Collator("en", { numeric: true });

export class RunTable {
  /**
   * @param {Object} source
   * @param {() => import("./permalink.js").State} state of the page
   * @param {() => void} save writes the state into the link
   */
  constructor(source, state, save) {
    this.source = source;
    this.state = state;
    this.save = save;
    this.sortedBy = "Started";
    this.isReversed = false;
    this.objective = null; // the default: a validation metric, else the best loss
    this.search = element("input", {
      type: "search",
      placeholder: "name, alert, lr<1e-3, optimizer=adam",
      title: "Words, and comparisons with <, >, = or !=, such as lr<1e-3 best_loss<0.5",
      "aria-label": "Filter runs",
      oninput: () => {
        this.state().filter = this.search.value;
        this.#change();
      },
      onkeydown: (event) => {
        if (event.key !== "Enter" || this.shown.length !== 1) return;
        event.preventDefault(); // else it also presses the button that gets the focus back
        this.#choose(this.shown[0]);
      },
    });
    this.count = element("span", { class: "count", role: "status" });
    this.title = element("h2", { id: "runs-title" });
    this.menu = element("div", { class: "columns" });
    this.table = element("table", {});
    this.widths = new Map(); // of columns that were dragged
    const resized = new MutationObserver((all) => all.forEach(({ target }) => this.#resized(target)));
    resized.observe(this.table, { subtree: true, attributeFilter: ["style"] });
    this.curves = new RunCurves(source, state, save);
    this.parallel = new Parallel(() => {
      this.scroll.style.minHeight = `${this.scroll.getBoundingClientRect().height}px`; // else a shorter table moves the chart
      this.#draw();
    });
    this.clear = element("button", { onclick: () => this.#pick([...this.state().checked], false) }, "Uncheck all");
    this.report = element("a", { class: "button", download: "" }, "Report");
    const region = { class: "runs-scroll", tabindex: "0", role: "region", "aria-label": "Runs" };
    this.scroll = element("div", region, this.table);
    const onclose = () => this.#leave();
    this.node = element(
      "dialog",
      { class: "runs", "aria-labelledby": "runs-title", onclose },
      element(
        "header",
        {},
        this.title,
        this.search,
        this.count,
        this.report,
        this.clear,
        element("details", { class: "menu" }, element("summary", {}, "Columns"), this.menu),
        element("button", { onclick: () => this.node.close() }, "Close"),
      ),
      this.scroll,
      this.curves.node,
      this.parallel.node,
    );
  }

  /**
   * @param {Object[]} runs known runs; the rest is loaded
   * @param {string} current name of the chosen run
   * @param {string} which `run`, or `other` for the one to compare with
   * @param {Object} about the subject of the curves: see `RunCurves.show`
   * @param {(name: string) => void} onChoose
   */
  async open(runs, current, which, about, onChoose) {
    this.runs = runs;
    this.about = about;
    this.curves.forget();
    this.parallel.ranges.clear();
    this.scroll.style.minHeight = "";
    this.current = current;
    this.omitted = which === "run" ? null : this.state().run;
    this.onChoose = onChoose;
    this.title.textContent = which === "run" ? "Runs" : "Compare with...";
    this.search.value = this.state().filter;
    if (this.state().checked.size) this.curves.node.open = true;
    delete this.node.dataset.loaded;
    this.#draw();
    this.node.showModal();
    this.search.focus();
    try {
      this.runs = await this.source.runTable();
      this.node.dataset.loaded = "true";
      this.#draw();
    } catch (error) {
      this.count.textContent = error.message;
    }
  }

  /** Draws, and keeps the choices in the link. */
  #change() {
    this.save();
    this.#draw();
  }

  #draw() {
    const { checked, columns: choices } = this.state();
    const columns = columnsOf(this.runs);
    const objectives = columns.filter(({ group, title }) => group === "metric" || title.endsWith(" loss"));
    const objective =
      objectives.find(({ title }) => title === this.objective) ??
      objectives.find(({ group, title }) => group === "metric" && VALIDATION.test(title)) ??
      objectives.find(({ title }) => title === "Best loss") ??
      objectives[0];
    const offered = this.runs.filter(({ name }) => name !== this.omitted);
    const matching = offered.filter(matcher(this.search.value, columns));
    const isFilled = ({ key }) => !matching.length || matching.some((run) => !isMissing(key(run)));
    const isShown = (column) => choices.get(column.title) ?? (column.isShown && isFilled(column));
    const visible = columns.filter(isShown);
    const axes = visible.filter(({ group }) => group === "hparam");
    const measures = visible.filter((column) => objectives.includes(column) && column !== objective);
    this.parallel.show(matching, [...axes, ...measures, ...(objective ? [objective] : [])], this.about.theme);
    const within = matching.filter((run) => this.parallel.accepts(run));
    const shown = (this.shown = this.#sorted(columns, within));
    const names = new Set(this.runs.map(({ name }) => name));
    for (const name of checked) if (!names.has(name)) checked.delete(name);
    const drawn = checked.size ? this.runs.filter(({ name }) => checked.has(name)) : shown;
    this.curves.show(drawn, this.about);
    const picked = checked.size ? `, ${checked.size} checked` : "";
    this.clear.hidden = !checked.size;
    this.report.hidden = !checked.size || !this.source.reportUrl;
    this.report.href = this.source.reportUrl?.([...checked]);
    this.count.textContent =
      (shown.length === offered.length
        ? `${shown.length} run${shown.length === 1 ? "" : "s"}`
        : `${shown.length || "none"} of ${offered.length} runs`) + picked;
    const all = [{ title: "Run", show: (run) => this.#name(run) }, ...visible];
    fill(
      this.table,
      element(
        "thead",
        {},
        element("tr", {}, ...all.map((column) => this.#head(column))),
        objective ? this.#correlations(visible, within, objective, objectives) : null,
      ),
      element("tbody", {}, ...shown.map((run) => this.#row(run, all))),
    );
    for (const head of this.table.tHead.rows[0].cells)
      head.style.width = this.widths.get(head.textContent) ?? "";
    fill(this.menu, ...columns.map((column) => this.#choice(column, isShown(column))));
  }

  /** A box that shows or hides a column. */
  #choice({ title }, checked) {
    const onchange = ({ target }) => {
      this.state().columns.set(title, target.checked);
      this.#change();
    };
    const box = element("input", { type: "checkbox", checked, dataset: { key: `column ${title}` }, onchange });
    return element("label", {}, box, title);
  }

  /** One number per column: how its ranks go with those of the objective. */
  #correlations(columns, runs, objective, objectives) {
    const values = columns.map((column) => {
      const isWorth = column.isNumber && column.group && column !== objective;
      return isWorth ? rankCorrelation(runs, column, objective) : null;
    });
    if (values.every((value) => value === null)) return null;
    const choose = (title) => {
      this.objective = title;
      this.#draw();
    };
    const options = objectives.map(({ title }) => [title, title]);
    const title = "Spearman's rank correlation of a column with this one, over the listed runs";
    const cells = values.map((value) => {
      const text = value === null ? "" : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;
      return element("td", { class: `number ${Math.abs(value) >= 0.5 ? "strong" : ""}` }, text);
    });
    const label = dropDown("Rank correlation with", options, objective.title, choose);
    label.title = title;
    return element("tr", { class: "correlations" }, element("td", {}, label), ...cells);
  }

  /** Cells are cut to the width that their column's head was dragged to. */
  #resized({ tagName, cellIndex, textContent, style }) {
    if (tagName !== "TH") return;
    this.widths.set(textContent, style.width);
    for (const { cells } of this.table.tBodies[0].rows) cells[cellIndex].style.maxWidth = style.width;
  }

  /** In the order of a column; runs without a value come last. */
  #sorted(columns, runs) {
    const found = columns.find((column) => column.title === this.sortedBy);
    const key = this.sortedBy === "Run" ? ({ name }) => name : (found?.key ?? (({ started }) => -started));
    const sign = this.isReversed ? -1 : 1;
    return [...runs].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (isMissing(x) || isMissing(y)) return isMissing(x) - isMissing(y);
      const areNumbers = typeof x === "number" && typeof y === "number";
      return sign * (areNumbers ? x - y : collator.compare(String(x), String(y)));
    });
  }

  #head({ title, isNumber }) {
    const isSorted = title === this.sortedBy;
    const order = this.isReversed ? "descending" : "ascending";
    const sort = () => {
      this.isReversed = isSorted && !this.isReversed;
      this.sortedBy = title;
      this.#draw();
    };
    return element(
      "th",
      { scope: "col", class: isNumber ? "number" : "", "aria-sort": isSorted ? order : "none" },
      element("button", { dataset: { key: title }, onclick: sort }, title),
    );
  }

  #row(run, columns) {
    const cells = columns.map(({ show, isNumber }) =>
      element("td", { class: isNumber ? "number" : "" }, show(run)),
    );
    const isCurrent = run.name === this.current;
    return element("tr", { class: isCurrent ? "chosen" : "", onclick: () => this.#choose(run) }, ...cells);
  }

  /** The run's name, and a box that draws it together with others. */
  #name({ name }) {
    const box = element("input", {
      type: "checkbox",
      checked: this.state().checked.has(name),
      "aria-label": `Draw ${name}`,
      dataset: { key: `pick ${name}` },
      onclick: (event) => event.stopPropagation(), // else the row is chosen
      onchange: ({ target }) => this.#pick([name], target.checked),
    });
    const isCurrent = name === this.current ? "true" : null;
    return element("span", { class: "run-cell" }, box, element("button", { class: "run-link", "aria-current": isCurrent }, name));
  }

  #pick(names, isPicked) {
    for (const name of names) this.state().checked[isPicked ? "add" : "delete"](name);
    if (isPicked) this.curves.node.open = true;
    this.#change();
  }

  #choose(run) {
    this.node.close();
    this.#leave(); // the event comes later: the page would open the table again
    this.onChoose(run.name);
  }

  #leave() {
    Object.assign(this.state(), { table: "", filter: "" });
    this.save();
  }
}
