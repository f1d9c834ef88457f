// The state of the page, one table: how each value begins, and how a link holds it.

/** Values of a text; "" is as good as none. */
const text = (initial = "") => ({ initial, encode: (value) => value, decode: (found) => found });

const oneOf = (...words) => ({
  initial: words[0],
  encode: (value) => (value === words[0] ? "" : value),
  decode: (found) => (words.includes(found) ? found : words[0]),
});

const flag = (word) => ({
  initial: false,
  encode: (value) => (value ? word : ""),
  decode: (found) => found === word,
});

const number = (isValid) => ({
  initial: null,
  encode: (value) => String(value ?? ""),
  decode: (found) => (isValid(Number(found)) ? Number(found) : null),
});

/** Whether something is so, in no link. */
const unlinked = { initial: false, encode: () => "", decode: () => false };

/** A set of texts, which may hold commas. */
const set = {
  initial: new Set(),
  encode: (values) => [...values].map((value) => value.replaceAll("%", "%25").replaceAll(",", "%2C")).join(","),
  decode: (found) => new Set(found.split(",").map((value) => value.replaceAll("%2C", ",").replaceAll("%25", "%"))),
};

const zoom = {
  initial: null,
  encode(view) {
    if (view === null) return "";
    const { step0, step1, row0, row1 } = view;
    return [step0, step1, row0, row1].map((end) => Math.round(end * 1000) / 1000).join(",");
  },
  decode(found) {
    const ends = found.split(",").map(Number);
    const [step0, step1, row0, row1] = ends;
    return ends.length === 4 && step0 < step1 && row0 < row1 ? { step0, step1, row0, row1 } : null;
  },
};

/** The name of a layer; that of the model itself is empty. */
const layer = {
  initial: null,
  encode: (name) => (name === null ? "" : `.${name}`),
  decode: (found) => found.slice(1),
};

const TABLE = {
  run: text(),
  other: text(), // the run to compare with
  statistic: text("grad_norm"),
  mode: oneOf("value", "own", "depth", "run"),
  order: oneOf("depth", "role"),
  search: text(),
  all: flag("1"), // whether layers without the statistic are shown, too
  folded: set,
  zoom, // a view; null: everything
  layer, // the selected one
  of: flag("other"), // whether the last click was in the other run
  step: number(Number.isFinite),
  alert: text(), // the chosen one: see `keyOfAlert`
  onsets: number(Number.isFinite), // the step around which the layers that changed first are listed
  histogram: text(), // which of the layer's
  table: oneOf("", "run", "other"), // the open table of runs, and what for
  filter: text(), // of that table
  checked: set, // runs that are drawn together
  columns: set, // of that table: those that are shown or hidden unlike usual
  curves: oneOf("", "loss", "layer"), // what of the runs is drawn; "": the layer, if one is selected
  smoothing: number((share) => share > 0 && share < 1),
  seeds: flag("grouped"), // whether runs that differ in the seed are one curve
  // Of a narrow window: whether the drawer at the side is open, and the toolbar complete.
  side: unlinked,
  full: unlinked,
};

const NEW_ENTRY = ["run", "other", "zoom"]; // the browser's Back undoes a change of these

export function toLink(state) {
  return Object.fromEntries(Object.entries(TABLE).map(([name, { encode }]) => [name, encode(state[name])]));
}

/** The state in a link; initial values for what is missing or invalid. */
export function fromLink(link) {
  const value = ([name, { decode: read, initial }]) => [name, link[name] ? read(link[name]) : initial];
  return Object.fromEntries(Object.entries(TABLE).map(value));
}

/** Whether the browser's Back should lead from one state to the one before. */
export function isEntry(before, after) {
  return NEW_ENTRY.some((name) => TABLE[name].encode(before[name]) !== TABLE[name].encode(after[name]));
}

/** A set with a value more, or without it if it has it. */
export function toggled(values, value) {
  return values.symmetricDifference(new Set([value]));
}

export function keyOfAlert({ step, kind, module_name: culprit }) {
  return [step, kind, culprit ?? ""].join(" ");
}

/** The same function of an object and more, which remembers its last result for each object. */
export function memo(compute) {
  const known = new WeakMap();
  return (object, ...of) => {
    const last = known.get(object);
    if (last && of.every((part, i) => part === last.of[i])) return last.result;
    const result = compute(object, ...of);
    known.set(object, { of, result });
    return result;
  };
}
