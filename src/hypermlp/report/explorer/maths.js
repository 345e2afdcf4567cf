// One row of a head, computed from the layer's own factors as analysis/memory.py does it: scores z, mixed scores h, hidden
// layer a, readout weights w, and how much of the head's output each slot and each token makes.
"use strict";

// 16-bit floats are rare in pages and absent from older browsers' typed arrays.
function halves(buffer) {
  const bits = new Uint16Array(buffer), out = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) {
    const b = bits[i], e = (b >> 10) & 31, f = b & 1023, sign = b & 32768 ? -1 : 1;
    out[i] = e === 0 ? sign * f * 2 ** -24 : e === 31 ? (f ? NaN : sign * Infinity) : sign * (1 + f / 1024) * 2 ** (e - 15);
  }
  return out;
}

function decode(packed) {
  const text = atob(packed.data), bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const values = packed.type === "f2" ? halves(bytes.buffer) : new Float32Array(bytes.buffer);
  return { values, shape: packed.shape };
}

// Arrays are decoded when a layer is first looked at.
function arraysOf(layer) {
  if (!layer.opened) {
    layer.opened = {};
    for (const [name, packed] of Object.entries(layer.arrays)) layer.opened[name] = decode(packed);
    delete layer.arrays;
  }
  return layer.opened;
}

function dot(a, i, b, j, n) {
  let sum = 0;
  for (let e = 0; e < n; e++) sum += a[i + e] * b[j + e];
  return sum;
}

// Which slots token t sees: [first, last].
function span(layer, t, T) {
  const last = layer.causal ? t : T - 1;
  return [layer.window && !layer.places ? Math.max(0, t - layer.window + 1) : 0, last];
}

function scores(layer, g, t, first, last) {
  const { q, k } = arraysOf(layer), [, G, K] = q.shape, z = new Float64Array(last - first + 1);
  if (layer.kind === "path") return walkBack(layer, g, t, first);
  for (let c = first; c <= last; c++) z[c - first] = dot(q.values, (t * G + g) * K, k.values, (c * G + g) * K, K);
  return z;
}

// PaTH: the query goes back from token to token and is reflected by each that it leaves.
function walkBack(layer, g, t, first) {
  const { q, k, turn, beta } = arraysOf(layer), [, G, K] = q.shape, z = new Float64Array(t - first + 1);
  const moving = Float64Array.from(q.values.subarray((t * G + g) * K, (t * G + g + 1) * K));
  for (let c = t; c >= first; c--) {
    const at = (c * G + g) * K;
    z[c - first] = dot(moving, 0, k.values, at, K);
    const strength = beta.values[c * G + g] * dot(moving, 0, turn.values, at, K);
    for (let e = 0; e < K; e++) moving[e] -= strength * turn.values[at + e];
  }
  return z;
}

// R(x_t) of a routing or reading head on slots first…last: D, A, B by column, s. Without mixing: null.
function operator(layer, number, g, t, first, last) {
  if (!layer.mixes[number - 1]) return null;
  const arrays = arraysOf(layer), A = arrays["A" + number], [G, P, R] = A.shape;
  const from = layer.places ? first : P - 1 - (t - first); // the parameter of the first column
  const part = (name, width) => {
    const { values } = arrays[name + number];
    return values.subarray((g * P + from) * width, (g * P + from + last - first + 1) * width);
  };
  const s = arrays["s" + number].values.subarray((t * G + g) * R, (t * G + g + 1) * R);
  return { A: part("A", R), B: part("B", R), D: part("D", 1), s, R, n: last - first + 1 };
}

// y R, or y Rᵀ: Lemma G.1.
function apply(op, y, transpose) {
  if (!op) return y;
  const { D, s, R, n } = op, A = transpose ? op.B : op.A, B = transpose ? op.A : op.B;
  const middle = new Float64Array(R), out = new Float64Array(n);
  for (let c = 0; c < n; c++) if (y[c]) for (let r = 0; r < R; r++) middle[r] += y[c] * A[c * R + r];
  for (let r = 0; r < R; r++) middle[r] *= s[r];
  for (let c = 0; c < n; c++) out[c] = y[c] * D[c] + dot(middle, 0, B, c * R, R);
  return out;
}

// Column i of R: how much of the token at each column slot i is made of.
function columnOf(op, i) {
  const out = new Float64Array(op.n);
  for (let c = 0; c < op.n; c++) {
    for (let r = 0; r < op.R; r++) out[c] += op.A[c * op.R + r] * op.s[r] * op.B[i * op.R + r];
  }
  out[i] += op.D[i];
  return out;
}

const softplus = (x) => (x > 30 ? x : Math.log1p(Math.exp(x)));

function softmax(z) {
  const top = z.reduce((a, b) => Math.max(a, b), -Infinity), out = z.map((x) => Math.exp(x - top));
  const total = out.reduce((a, b) => a + b, 0);
  return { a: out.map((x) => x / total), rho: total * Math.exp(top) };
}

function activate(layer, h) {
  const n = h[0].length;
  if (layer.kind !== "hyper") {
    const first = softmax(h[0]), active = new Uint8Array(n).fill(1);
    if (layer.kind !== "differential") return { ...first, active };
    const second = softmax(h[1]);
    return { rho: first.rho, active, a: first.a.map((x, i) => x - layer.strength * second.a[i]) };
  }
  const rho = layer.norm ? Math.sqrt(h[0].reduce((sum, x) => sum + x * x, 0) + layer.eps) : 1;
  const active = Uint8Array.from(h[0], (x) => x > 0);
  return { rho, active, a: h[0].map((x, i) => (x > 0 ? (x / rho) * (layer.glu ? softplus(h[1][i]) : 1) : 0)) };
}

// All of one head at one token. mixing = false: as it would be with R1 = R2 = I.
function readRow(layer, head, t, T, mixing = true) {
  const [first, last] = span(layer, t, T), n = last - first + 1;
  const two = layer.glu || layer.kind === "differential", heads = two ? [head, head + layer.heads] : [head];
  const R1 = heads.map((g) => (mixing ? operator(layer, 1, g, t, first, last) : null));
  const R2 = mixing ? operator(layer, 2, head, t, first, last) : null;
  const z = heads.map((g) => scores(layer, g, t, first, last)), h = z.map((y, i) => apply(R1[i], y, false));
  const { rho, active, a } = activate(layer, h), w = apply(R2, a, true);
  const { v, g, size } = arraysOf(layer), [, H, V] = v.shape, along = new Float64Array(n);
  for (let c = first; c <= last; c++) along[c - first] = dot(v.values, (c * H + head) * V, g.values, (t * H + head) * V, V);
  const slotAlong = apply(R2, along, false); // v_i · g of the mixed values
  return {
    t, first, n, z, h, rho, active, a, w, R1, R2, size: size.values[t * H + head],
    count: active.reduce((sum, x) => sum + x, 0),
    share: a.map((x, i) => x * slotAlong[i]), tokenShare: w.map((x, c) => x * along[c]),
  };
}

// Columns by falling size of what they hold.
function largest(values, count) {
  const order = Array.from(values.keys()).filter((i) => values[i] !== 0);
  return order.sort((i, j) => Math.abs(values[j]) - Math.abs(values[i])).slice(0, count);
}

if (typeof module !== "undefined") module.exports = { readRow, largest, columnOf, decode };
