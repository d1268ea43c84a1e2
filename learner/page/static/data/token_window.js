// A window of tokens as the server packs it: "USPT", the length of a JSON header, the header, then arrays of four bytes a value.
const TYPES = { i32: Int32Array, f32: Float32Array, u8: Uint8Array };

export function decodeTokens(buffer) {
  const view = new DataView(buffer);
  const magic = String.fromCharCode(...new Uint8Array(buffer, 0, 4));
  if (magic !== "USPT") throw new Error(`a window of tokens begins with USPT, not with ${magic}`);
  const headerLength = view.getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, headerLength)));
  const arrays = {};
  for (const { name, type, offset } of header.arrays) {
    arrays[name] = new TYPES[type](buffer, 8 + headerLength + offset, header.count);
  }
  return { branch: header.branch, start: header.start, count: header.count, total: header.num_tokens, pieces: header.pieces, figures: header.figures, arrays };
}

// A part of a window: the same as if it alone had been asked for.
export function cutWindow(window, start, count) {
  const from = start - window.start;
  const to = Math.min(window.count, from + count);
  const arrays = Object.fromEntries(Object.entries(window.arrays).map(([name, values]) => [name, values.subarray(from, to)]));
  return { ...window, start, count: to - from, pieces: window.pieces.slice(from, to), arrays };
}

// The figures of the token at `index` of a window; null where it has none.
export function tokenAt(window, index) {
  const known = (name) => {
    const value = window.arrays[name]?.[index];
    return value === undefined || Number.isNaN(value) ? null : value;
  };
  const atLeastZero = (name) => (known(name) >= 0 ? known(name) : null);
  const logprob = known("logprob");
  const learner = known("learner");
  return {
    position: window.start + index,
    id: known("ids"),
    piece: window.pieces[index],
    sampled: known("sampled") === 1,
    mask: known("mask") === 1,
    trained: known("trained") === 1,
    version: atLeastZero("version"),
    round: atLeastZero("round"),
    logprob,
    learner,
    startLogprob: known("start_logprob"),
    difference: logprob === null || learner === null ? null : learner - logprob,
    advantage: known("advantage"),
  };
}
