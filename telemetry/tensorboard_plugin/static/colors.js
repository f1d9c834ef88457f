// Colors of the heat map.

// viridis (matplotlib, CC0), every eighth color, from the smallest value to the largest: `rrggbb`
// of 33 colors.
export const VIRIDIS =
  "440154470d6048186a482475472e7c4538824241863e4c8a3a548c365d8d32658e2e6d8e2b758e287d8e25848e" +
  "228c8d1f948c1e9c8920a38625ab822eb37c3aba7648c16e58c76569cd5b7fd34e93d741a8db34bddf26d5e21a" +
  "eae51afde725";

// Two colors of stripes each.
export const NAN_COLORS = ["#d5006d", "#ff7ac0"];
export const INFINITE_COLORS = ["#ff5a00", "#7a1f00"];

export const ZERO_COLOR = "#000000";
