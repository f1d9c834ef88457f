// Rows of the picture: groups by module path or role, folded groups, a filter.

/**
 * @typedef {Object} Row
 * @property {number[]} layers behind the row, ascending
 * @property {string} label
 * @property {string} type class of the module, or how many layers are folded
 * @property {string|null} folded path of the group that the row represents
 */

/** Path of a module, as in "encoder.layers.0"; the model itself has none. */
function pathOf(layer) {
  return layer.name ? layer.name.split(".") : [];
}

/** What a layer is called. */
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
 * @property {Map<string, number[]>} groups layers by the group's path, outer groups first
 * @property {string[][]} keys of each layer, paths of the groups around it, the outermost first
 * @property {number[]} order in which the layers are shown
 */

/** By the beginning of the module's path, in forward order. @returns {Grouping} */
export function groupByPath(layers) {
  const groups = new Map();
  const prefixes = layers.map((layer) => {
    const path = pathOf(layer);
    return path.map((_, depth) => path.slice(0, depth + 1).join("."));
  });
  prefixes.forEach((keys, index) => {
    for (const key of keys.slice(0, -1)) {
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(index);
    }
    // A module that has layers inside belongs to its own group.
    if (groups.has(layers[index].name)) groups.get(layers[index].name).push(index);
  });
  for (const [key, members] of groups) {
    members.sort((a, b) => a - b);
    if (members.length < 2 || hasSameInside(groups, key)) groups.delete(key);
  }
  return {
    groups,
    keys: prefixes.map((keys) => keys.filter((key) => groups.has(key))),
    order: layers.map((_, index) => index),
  };
}

/**
 * By a layer's role in its block, such as `attn.qkv` in all of "blocks.3.attn.qkv", else by class.
 * @returns {Grouping} one role behind the other, each in forward order
 */
export function groupByRole(layers) {
  const roles = layers.map(roleOf);
  const groups = Map.groupBy(roles.keys(), (index) => roles[index]);
  const order = [...groups.values()].flat();
  for (const [role, members] of groups) if (members.length < 2) groups.delete(role);
  return { groups, keys: roles.map((role) => (groups.has(role) ? [role] : [])), order };
}

/** The part of a path after its last number; the class without such a part. */
function roleOf(layer) {
  const path = pathOf(layer);
  const isNumber = (part) => /^\d+$/.test(part);
  let end = path.length;
  while (end > 0 && isNumber(path[end - 1])) end -= 1;
  const last = path.slice(0, end).findLastIndex(isNumber);
  return last < 0 ? layer.type : path.slice(last + 1).join(".");
}

/** Whether a group holds one other group and nothing else, as in "encoder" of "encoder.layers". */
function hasSameInside(groups, outer) {
  const { length } = groups.get(outer);
  return [...groups].some(([key, members]) => key.startsWith(`${outer}.`) && members.length === length);
}

/** Paths of all groups at a depth, 1 being the outermost. */
export function groupsAtDepth({ keys }, depth) {
  return [...new Set(keys.map((own) => own[depth - 1]).filter((key) => key !== undefined))];
}

/** Greatest depth of a group; 0 without groups. */
export function deepest({ keys }) {
  return keys.reduce((most, own) => Math.max(most, own.length), 0);
}

/**
 * @param {{name: string, type: string}[]} layers
 * @param {Grouping} grouping
 * @param {Set<string>} folded paths of groups that take one row each
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
    const { length } = behind;
    if (typeof key === "string")
      return { layers: behind, label: key, type: `${length} layer${length > 1 ? "s" : ""}`, folded: key };
    const layer = layers[key];
    const type = isUntrained(layer) ? `${layer.type}, ${layer.state}` : layer.type;
    return { layers: behind, label: titleOf(layer), type, folded: null };
  });
}

/** The row of each layer that is shown. @returns {Map<number, number>} */
export function rowsByLayer(rows) {
  const found = new Map();
  rows.forEach((row, index) => row.layers.forEach((layer) => found.set(layer, index)));
  return found;
}

/** The row that shows a layer; −1 without one. */
export function rowOfLayer(rows, layer) {
  return rows.findIndex((row) => row.layers.includes(layer));
}

/** The innermost group of a layer that is not folded yet; undefined without one. */
export function innermostOpen(layer, { keys }, folded) {
  return keys[layer].findLast((key) => !folded.has(key));
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
    while (open.length && !around.includes(open[open.length - 1].path)) open.pop();
    for (const bracket of open) bracket.last = index;
    for (const path of around.slice(open.length)) {
      const bracket = { path, depth: open.length + 1, first: index, last: index };
      open.push(bracket);
      brackets.push(bracket);
    }
  });
  return brackets;
}
