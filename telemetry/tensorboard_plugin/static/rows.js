// Which layers are shown on which row: groups by module path, folded ones, a search.

/**
 * @typedef {Object} Row
 * @property {number[]} layers behind the row, ascending
 * @property {string} label
 * @property {string} type class of the module, or how many layers are folded
 * @property {string|null} folded path of the group that the row stands for
 */

/** Path of a module, as in "encoder.layers.0"; the model itself has none. */
export function pathOf(layer) {
  return layer.name ? layer.name.split(".") : [];
}

/** What a layer is called. */
export function titleOf(layer) {
  return layer.name || `${layer.type} (the model)`;
}

/**
 * Groups of at least two layers that share the beginning of their path.
 * @returns {Map<string, number[]>} layers by path, outer groups first
 */
export function groupsOf(layers) {
  const groups = new Map();
  layers.forEach((layer, index) => {
    const path = pathOf(layer);
    for (let depth = 1; depth < path.length; depth++) {
      const key = path.slice(0, depth).join(".");
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(index);
    }
    // A module that has layers inside belongs to its own group.
    if (groups.has(layer.name)) groups.get(layer.name).push(index);
  });
  for (const [key, members] of groups) {
    members.sort((a, b) => a - b);
    if (members.length < 2 || hasSameInside(groups, key)) groups.delete(key);
  }
  return groups;
}

/** Whether a group holds one other group and nothing else, as in "encoder" of "encoder.layers". */
function hasSameInside(groups, outer) {
  const { length } = groups.get(outer);
  for (const [key, members] of groups) {
    if (key.startsWith(`${outer}.`) && members.length === length) return true;
  }
  return false;
}

/** Paths of all groups at a depth, 1 being the outermost. */
export function groupsAtDepth(groups, depth) {
  return [...groups.keys()].filter((key) => depthOf(groups, key) === depth);
}

/** Greatest depth of a group; 0 without groups. */
export function deepest(groups) {
  return [...groups.keys()].reduce((most, key) => Math.max(most, depthOf(groups, key)), 0);
}

/** How many groups a group is in, itself included. */
function depthOf(groups, key) {
  const path = key.split(".");
  return path.filter((_, i) => groups.has(path.slice(0, i + 1).join("."))).length;
}

/**
 * @param {{name: string, type: string}[]} layers
 * @param {Map<string, number[]>} groups
 * @param {Set<string>} folded paths of groups that take one row each
 * @param {string} search layers whose name or type does not contain it are left out
 * @param {Set<number>|null} shown the only layers that are shown; null: all
 * @returns {Row[]} in forward order, a group at the place of its first layer
 */
export function makeRows(layers, groups, folded, search, shown = null) {
  const rows = [];
  const rowOfGroup = new Map();
  const wanted = search.trim().toLowerCase();
  layers.forEach((layer, index) => {
    if (shown && !shown.has(index)) return;
    if (wanted && !`${layer.name} ${layer.type}`.toLowerCase().includes(wanted)) return;
    const group = outermostFolded(layer, groups, folded);
    if (group === null) {
      rows.push({ layers: [index], label: titleOf(layer), type: layer.type, folded: null });
    } else if (rowOfGroup.has(group)) {
      const row = rowOfGroup.get(group);
      row.layers.push(index);
      row.type = `${row.layers.length} layers`;
    } else {
      const row = { layers: [index], label: group, type: "1 layer", folded: group };
      rowOfGroup.set(group, row);
      rows.push(row);
    }
  });
  return rows;
}

/** The innermost group of a layer that is not folded yet; null without one. */
export function innermostOpen(layer, groups, folded) {
  const path = pathOf(layer);
  for (let depth = path.length; depth > 0; depth--) {
    const key = path.slice(0, depth).join(".");
    if (groups.has(key) && !folded.has(key)) return key;
  }
  return null;
}

function outermostFolded(layer, groups, folded) {
  if (!folded.size) return null;
  const path = pathOf(layer);
  for (let depth = 1; depth <= path.length; depth++) {
    const key = path.slice(0, depth).join(".");
    if (folded.has(key) && groups.has(key)) return key;
  }
  return null;
}

/**
 * Stretches of successive rows that belong to one group, for the brackets at the side.
 * @returns {{path: string, depth: number, first: number, last: number}[]} rows, both ends included
 */
export function bracketsOf(rows, layers, groups) {
  const brackets = [];
  const open = [];
  rows.forEach((row, index) => {
    const parts = row.folded ? row.folded.split(".") : pathOf(layers[row.layers[0]]);
    const keys = parts
      .map((_, depth) => parts.slice(0, depth + 1).join("."))
      .filter((key) => groups.has(key) && key !== row.folded);
    while (open.length && !keys.some((key) => key === open[open.length - 1].path)) open.pop();
    for (const bracket of open) bracket.last = index;
    for (const path of keys.slice(open.length)) {
      const bracket = { path, depth: open.length + 1, first: index, last: index };
      open.push(bracket);
      brackets.push(bracket);
    }
  });
  return brackets;
}
