// How a token is coloured: a scale turns its figures into one of a few steps, each a class of the style sheet that reads well in
// both themes and to the colour-blind. The exact figure stands beside the tokens.
const step = (value, bounds) => bounds.filter((bound) => value >= bound).length;
const UNLIKELY = [0.1, 0.5, 1, 2, 4, 7];
const APART = [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1];

const sequential = (prefix, words) => words.map((word, index) => [`${prefix}-${index}`, word]);

export const SCALES = {
  logprob: {
    label: "log-probability",
    legend: () => sequential("lp", ["> 0.90", "> 0.61", "> 0.37", "> 0.14", "> 0.02", "> 0.001", "less likely"]),
    of: (token) => (token.logprob === null ? null : `lp-${step(-token.logprob, UNLIKELY)}`),
    notable: (token) => token.logprob !== null && -token.logprob >= 4,
  },
  difference: {
    label: "engine – learner",
    legend: () => sequential("df", ["< 1e-5", "1e-5", "1e-4", "0.001", "0.01", "0.1", "> 1 nat"]),
    of: (token) => (token.difference === null ? null : `df-${step(Math.abs(token.difference), APART)}`),
    notable: (token) => token.difference !== null && Math.abs(token.difference) >= 1e-3,
  },
  version: {
    label: "policy version",
    legend: ({ versions }) => versions.map((version) => [`vn-${version % 6}`, `v${version}`]),
    of: (token) => (token.version === null ? null : `vn-${token.version % 6}`),
    notable: (token, before) => token.version !== null && before !== null && before.version !== null && token.version !== before.version,
  },
  advantage: {
    label: "advantage",
    legend: ({ largest }) => [["ad-n3", `–${largest}`], ["ad-n2", ""], ["ad-n1", ""], ["ad-0", "0"], ["ad-p1", ""], ["ad-p2", ""], ["ad-p3", `+${largest}`]],
    of: (token, { largestValue }) => {
      if (token.advantage === null) return null;
      const size = step(Math.abs(token.advantage) / (largestValue || 1), [0.02, 0.34, 0.67]);
      return size === 0 ? "ad-0" : `ad-${token.advantage > 0 ? "p" : "n"}${size}`;
    },
    notable: (token, before) => token.advantage !== null && (before === null || token.advantage !== before.advantage),
  },
  mask: {
    label: "mask",
    legend: () => [["mk-on", "trained"], ["mk-weightless", "to be trained, had no weight"], ["mk-off", "sampled, not trained here"]],
    of: (token) => (!token.sampled ? null : token.mask ? (token.trained ? "mk-on" : "mk-weightless") : "mk-off"),
    notable: (token, before) => before !== null && token.mask !== before.mask,
  },
};

// What a scale needs to know of the window or of the whole episode.
export function contextOf(window, advantages) {
  const versions = [...new Set(window.arrays.version)].filter((version) => version >= 0).sort((a, b) => a - b);
  const largestValue = advantages ? Math.max(Math.abs(advantages.min), Math.abs(advantages.max)) : Math.max(0, ...Array.from(window.arrays.advantage, (value) => Math.abs(value) || 0));
  return { versions, largestValue, largest: Number(largestValue.toPrecision(2)) };
}
