// Rows of the picture: groups by module path or role, folded groups, a filter.

/**
 * @typedef {Object} Row
 * @property {number[]} layers behind the row, ascending
 * @property {string} label
 * @property {string} type class of the module, or how many layers are folded
 * @property {string|null} folded name of the group that the row represents
 */

export function titleOf(layer) {
  return layer.name || `${layer.type} (the model)`;
}

/** Whether a layer has parameters of which none trains. */
export function isUntrained({ state }) {
  return Boolean(state) && state !== "trains";
}

/**
 * How layers are grouped.
 * @typedef {Object} Grouping
 * @property {string[][]} keys of each layer, names of the groups around it, the outermost first
 * @property {number[]} order in which the layers are shown
 */

/** By the beginning of the module's path, in forward order. @returns {Grouping} */
export function groupByPath(layers) {
  const pathsTo = (name) => name.split(".").map((_, depth, parts) => parts.slice(0, depth + 1).join("."));
  const paths = layers.map(({ name }) => pathsTo(name));
  const sizes = new Map();
  for (const path of paths.flat()) sizes.set(path, (sizes.get(path) ?? 0) + 1);
  // A group that holds one other group and nothing else, as "encoder" in "encoder.layers", is none.
  const isGroup = (path, i, own) => sizes.get(path) > 1 && sizes.get(path) !== sizes.get(own[i + 1]);
  return { keys: paths.map((own) => own.filter(isGroup)), order: [...layers.keys()] };
}

/** By the layer's role in its block, such as `attn.qkv`, each role in forward order. @returns {Grouping} */
export function groupByRole(layers) {
  const roles = Map.groupBy(layers.keys(), (index) => layers[index].role);
  const keys = layers.map(({ role }) => (roles.get(role).length > 1 ? [role] : []));
  return { keys, order: [...roles.values()].flat() };
}

/** Names of all groups at a depth, 1 being the outermost. */
export function groupsAtDepth({ keys }, depth) {
  return [...new Set(keys.map((own) => own[depth - 1]).filter((key) => key !== undefined))];
}

export function deepest({ keys }) {
  return keys.reduce((most, own) => Math.max(most, own.length), 0);
}

/**
 * @param {Set<string>} folded names of groups that take one row each
 * @param {string} search the name, the class, the state or the word pictures contains it
 * @param {Set<number>|null} shown the only layers that are shown; null: all
 * @returns {Row[]} a group at the place of its first layer
 */
export function makeRows(layers, grouping, folded, search, shown = null) {
  const wanted = search.trim().toLowerCase();
  const isShown = (index) => {
    const { name, type, hasPictures, state } = layers[index];
    const words = `${name} ${type} ${state}${hasPictures ? " pictures" : ""}`;
    return (!shown || shown.has(index)) && words.toLowerCase().includes(wanted);
  };
  const keyOf = (index) => grouping.keys[index].find((key) => folded.has(key)) ?? index;
  return [...Map.groupBy(grouping.order.filter(isShown), keyOf)].map(([key, behind]) => {
    if (typeof key === "string") {
      const type = behind.length > 1 ? `${behind.length} layers` : "1 layer";
      return { layers: behind, label: key, type, folded: key };
    }
    const layer = layers[key];
    const type = isUntrained(layer) ? `${layer.type}, ${layer.state}` : layer.type;
    return { layers: behind, label: titleOf(layer), type, folded: null };
  });
}

/** The row of each layer that is shown. @returns {Map<number, number>} */
export function rowsByLayer(rows) {
  return new Map(rows.flatMap(({ layers }, row) => layers.map((layer) => [layer, row])));
}

/** The row that shows a layer; −1 without one. */
export function rowOfLayer(rows, layer) {
  return rows.findIndex((row) => row.layers.includes(layer));
}

/**
 * Stretches of successive rows that belong to one group, for the brackets at the side.
 * @returns {{path: string, depth: number, first: number, last: number}[]} rows, both ends included
 */
export function bracketsOf(rows, { keys }) {
  const brackets = [];
  const open = [];
  rows.forEach((row, index) => {
    const own = keys[row.layers[0]];
    const around = row.folded ? own.slice(0, own.indexOf(row.folded)) : own;
    while (open.length && !around.includes(open.at(-1).path)) open.pop();
    for (const bracket of open) bracket.last = index;
    for (const path of around.slice(open.length)) {
      const bracket = { path, depth: open.length + 1, first: index, last: index };
      open.push(bracket);
      brackets.push(bracket);
    }
  });
  return brackets;
}
