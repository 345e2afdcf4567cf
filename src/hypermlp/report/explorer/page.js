// The page: one state, one function that draws it. Everything shown is computed here from the layer's own factors (maths.js).
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const T = data.tokens.length, DIFFERENCE = "difference", COLOURS = ["weight", "share", "address", "surprise"];
const state = { model: 0, token: T - 1, pick: data.models.map(firstReadable), order: "time", mixing: true, colour: "weight", slot: null };

// The last layer that can be looked into, and the head that adds most at the end of the text.
function firstReadable(model) {
  const layer = model.layers.findLastIndex((found) => found.kind !== "state");
  if (layer < 0) return { layer: 0, head: 0 };
  const { values, shape } = arraysOf(model.layers[layer]).size, last = values.slice(-shape[1]);
  return { layer, head: last.indexOf(Math.max(...last)) };
}

// What goes into innerHTML and may come from outside, such as a folder's name.
const escaped = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

// ---- what is looked at ----

const rows = new Map();
const shownModels = () => (state.model === DIFFERENCE ? [0, 1] : [state.model]);
const layerOf = (m) => data.models[m].layers[state.pick[m].layer];

function rowOf(m, mixing = state.mixing) {
  const { layer, head } = state.pick[m], key = [m, layer, head, state.token, mixing].join();
  if (!rows.has(key)) {
    if (rows.size > 64) rows.clear();
    rows.set(key, readRow(data.models[m].layers[layer], head, state.token, T, mixing));
  }
  return rows.get(key);
}

// A word of a text is predicted at the place before it, an answer of a task at its own.
function surprise(m, c) {
  const p = data.models[m].next[data.words ? c : c - 1];
  return p === undefined || p === null ? 0 : -Math.log2(p);
}

const surprises = () => {
  const [m] = shownModels();
  return data.tokens.map((_, c) => (state.model === DIFFERENCE ? surprise(1, c) - surprise(0, c) : surprise(m, c)));
};

// Values by token of the text, and what they are.
function colouring() {
  if (state.colour === "surprise") {
    const words = state.model === DIFFERENCE ? `bits of surprise that ${name(1)} has more than ${name(0)}` : "bits of surprise at each token";
    return { values: surprises(), words, everywhere: true };
  }
  if (!readable()) return { values: new Array(T).fill(0), words: "nothing: this layer keeps no slots", everywhere: true };
  const spread = (row, found) => {
    const out = new Array(T).fill(0);
    found.forEach((value, i) => (out[row.first + i] = value));
    return out;
  };
  if (state.model === DIFFERENCE) {
    const [a, b] = [0, 1].map((m) => spread(rowOf(m), rowOf(m).tokenShare));
    return { values: a.map((value, c) => value - b[c]), words: `share of the output in ${name(0)} minus that in ${name(1)}` };
  }
  const row = rowOf(state.model);
  const [found, words] = {
    weight: [row.w, "readout weight w of each token’s value"],
    share: [row.tokenShare, "share of the head’s output that each token’s value makes"],
    address: [row.h[0], "address h of each slot: active above 0"],
  }[state.colour];
  return { values: spread(row, found), words };
}

const name = (m) => data.models[m].name;
const readable = () => shownModels().every((m) => layerOf(m).kind !== "state");
const visible = (text) => text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣");
const spoken = (c) => visible(data.tokens[c]);
const percent = (x, digits = 1) => `${(100 * x).toFixed(digits)} %`.replace("-", "−");

// ---- the text ----

function buildText() {
  const box = $("text");
  box.classList.toggle("words", data.words);
  data.tokens.forEach((text, c) => {
    const span = document.createElement("span");
    span.textContent = text === "\n" ? "⏎\n" : text === "\t" ? "⇥\t" : text;
    span.id = `token-${c}`;
    span.setAttribute("role", "option");
    span.setAttribute("aria-label", `${c}: ${spoken(c)}`);
    if (data.special.includes(c)) span.classList.add("special");
    span.dataset.c = c;
    box.append(span);
  });
  box.addEventListener("click", (event) => {
    const c = event.target.dataset.c;
    if (c !== undefined) change({ token: Number(c), slot: null });
  });
}

function drawText() {
  const { values, words, everywhere } = colouring(), top = values.reduce((m, v) => Math.max(m, Math.abs(v)), 0);
  const spans = $("text").children, selected = spans[state.token];
  values.forEach((value, c) => {
    const span = spans[c];
    span.style.backgroundColor = value && top ? signed(value, (0.85 * (Math.abs(value) / top) ** 0.7).toFixed(3)) : "";
    span.classList.toggle("future", c > state.token && !everywhere);
    span.setAttribute("aria-selected", c === state.token);
    span.dataset.value = value;
  });
  $("text").setAttribute("aria-activedescendant", selected.id);
  const box = $("text"), above = selected.offsetTop - box.scrollTop;
  if (above < 0 || above > box.clientHeight - 30) box.scrollTop = selected.offsetTop - box.clientHeight / 2;
  $("legend").innerHTML = `takes away <span class="swatch"></span> adds · full colour is ±${number(top)} · `;
  $("legend").append(words);
}

// ---- words ----

function sentence() {
  const where = (m) => `layer ${state.pick[m].layer + 1}, head ${state.pick[m].head + 1}`;
  const at = `At “${spoken(state.token)}” (token ${state.token})`;
  if (!readable()) return `${at}: this layer condenses its past into a state of fixed size, so there are no slots to look at.`;
  if (state.model === DIFFERENCE) return `${at}: ${name(0)} (${where(0)}) against ${name(1)} (${where(1)}).`;
  const row = rowOf(state.model), [best] = largest(row.tokenShare, 1);
  const most = best === undefined ? "it reads nothing" : `it reads most from “${spoken(row.first + best)}”, ${lagWords(row, best)} (${percent(row.tokenShare[best], 0)} of its output)`;
  return `${at}, ${where(state.model)}${state.mixing ? "" : ", without mixing"}: ${row.count} of ${row.n} slots are active, and ${most}.`;
}

function lagWords(row, i) {
  const lag = row.t - row.first - i;
  return lag === 0 ? "itself" : lag < 0 ? `${-lag} ahead` : `${lag} back`;
}

// ---- the right column ----

function drawHeads() {
  const parts = shownModels().map((m) => {
    const sizes = data.models[m].layers.map((layer) => (layer.kind === "state" ? [] : sizesOf(layer)));
    const top = Math.max(...sizes.flat(), 1e-30);
    const body = sizes.map((found, l) => {
      const cells = found.map((size, h) => {
        const here = state.pick[m].layer === l && state.pick[m].head === h;
        return `<td><button type="button" aria-pressed="${here}" data-m="${m}" data-l="${l}" data-h="${h}"
          aria-label="layer ${l + 1}, head ${h + 1}, adds a vector of length ${number(size)}">head ${h + 1}<i style="--w:${size / top}"></i></button></td>`;
      });
      return `<tr><th scope="row">layer ${l + 1}</th>${cells.join("") || '<td class="note">keeps a state</td>'}</tr>`;
    });
    const title = data.models.length > 1 ? `<h3></h3>` : "";
    return `${title}<table class="heads" data-m="${m}">${body.join("")}</table>`;
  });
  $("heads").innerHTML = parts.join("") + '<p class="note">Bars: the length of what each head adds at this token.</p>';
  $("heads").querySelectorAll("h3").forEach((h, i) => (h.textContent = name(shownModels()[i])));
}

function sizesOf(layer) {
  const { size } = arraysOf(layer), H = size.shape[1];
  return Array.from({ length: H }, (_, h) => size.values[state.token * H + h]);
}

function drawStages() {
  const lines = [];
  for (const m of readable() ? shownModels() : []) {
    const row = rowOf(m), of = state.model === DIFFERENCE ? ` in ${escaped(name(m))}` : "";
    const five = largest(row.share, 5), made = five.reduce((sum, i) => sum + row.share[i], 0);
    const soft = layerOf(m).kind === "hyper" ? "" : " (a softmax leaves none out)";
    lines.push([row.n, `<b data-n="pool-${m}">${row.n}</b> slots in the pool${of}`, 1]);
    lines.push([row.count, `<b data-n="active-${m}">${row.count}</b> active${soft}`, row.count / row.n]);
    lines.push([five.length, `<b data-n="five-${m}">${five.length}</b> that matter: together ${percent(made, 0)} of ${state.mixing ? "the output" : "the true output"}`, five.length / row.n]);
  }
  $("stages").innerHTML = lines.map(([, words, w]) => `<li>${words}<span class="bar" style="--w:${w}"></span></li>`).join("");
  $("switched").textContent = switchedWords();
}

function switchedWords() {
  if (!readable() || state.model === DIFFERENCE) return "";
  const layer = layerOf(state.model);
  if (layer.kind !== "hyper") return "";
  if (!layer.mixes[0]) return "This layer has no R1: what is active is decided by the scores alone.";
  const { on, off } = switched();
  return `Against R = I, mixing has switched ${on} slots on and ${off} off.`;
}

function switched() {
  const [mixed, plain] = [true, false].map((mixing) => rowOf(state.model, mixing).active);
  let on = 0, off = 0;
  mixed.forEach((active, i) => (active === plain[i] ? 0 : active ? on++ : off++));
  return { on, off };
}

function drawFive() {
  if (!readable()) return ($("five").innerHTML = "");
  const difference = state.model === DIFFERENCE, row = rowOf(shownModels()[0]);
  const found = difference ? largest(differences(), 5) : largest(row.share, 5);
  const heads = difference ? ["token", "lag", name(0), name(1), "difference"] : ["slot", "lag", "address h", "hidden a", "share"];
  const cells = (i) => {
    if (difference) {
      const [a, b] = [0, 1].map((m) => shareAt(m, i));
      return [spoken(i), state.token - i, percent(a), percent(b), percent(a - b)];
    }
    const lag = row.t - row.first - i;
    return [spoken(row.first + i), lag, number(row.h[0][i]), number(row.a[i]), percent(row.share[i])];
  };
  const line = (i) => {
    const raw = difference ? "" : ` data-h="${row.h[0][i]}" data-a="${row.a[i]}" data-w="${row.w[i]}" data-share="${row.share[i]}"`;
    const place = difference ? i : row.first + i;
    return `<tr data-c="${place}"${raw} tabindex="0" class="${state.slot === place ? "chosen" : ""}">${cells(i).map((_, j) => (j ? "<td></td>" : '<td class="token"></td>')).join("")}</tr>`;
  };
  $("five").innerHTML = `<thead><tr>${heads.map(() => "<th scope=col></th>").join("")}</tr></thead><tbody>${found.map(line).join("")}</tbody>`;
  [...$("five").tHead.rows[0].cells].forEach((cell, j) => (cell.textContent = heads[j]));
  [...$("five").tBodies[0].rows].forEach((tr, k) => cells(found[k]).forEach((text, j) => (tr.cells[j].textContent = text)));
}

const shareAt = (m, c) => rowOf(m).tokenShare[c - rowOf(m).first] || 0;
const differences = () => Float64Array.from({ length: T }, (_, c) => shareAt(0, c) - shareAt(1, c));

function drawNext() {
  const real = data.targets[state.token];
  $("next").innerHTML = "";
  for (const m of shownModels()) {
    const model = data.models[m];
    if (data.models.length > 1) $("next").append(Object.assign(document.createElement("h3"), { textContent: model.name }));
    for (const [text, p] of model.top[state.token]) {
      const line = document.createElement("div");
      line.className = `guess${text === real ? " right" : ""}`;
      line.innerHTML = `<code></code><i style="--w:${p}"></i><span>${percent(p)}</span>`;
      line.firstChild.textContent = visible(text);
      $("next").append(line);
    }
    const note = Object.assign(document.createElement("p"), { className: "note" });
    const none = data.words ? "No answer is asked for here." : "The text ends here.";
    note.textContent = real === null ? none : `${data.words ? "The right answer" : "What came"} is “${visible(real)}”, with ${percent(model.next[state.token])}.`;
    $("next").append(note);
  }
}

// ---- the left column ----

let placeUnder = () => -1;

function bandsNow() {
  if (state.model === DIFFERENCE) {
    const [a, b] = [0, 1].map((m) => Float64Array.from({ length: state.token + 1 }, (_, c) => shareAt(m, c)));
    return [
      { label: `share in ${name(0)}`, values: a },
      { label: `share in ${name(1)}`, values: b },
      { label: "difference", values: a.map((x, c) => x - b[c]) },
    ];
  }
  const row = rowOf(state.model), layer = layerOf(state.model), off = (i) => !row.active[i];
  if (layer.kind !== "hyper") {
    const two = row.z.length > 1;
    const found = [{ label: two ? "z, scores of the first map" : "z, scores", values: row.z[0] }];
    if (two) found.push({ label: "z, scores of the second map", values: row.z[1] });
    return [...found, { label: two ? "w, difference of the two softmax maps" : "w, attention weights", values: row.w }];
  }
  const plain = rowOf(state.model, false), changed = (i) => row.active[i] - plain.active[i];
  const found = [{ label: "z, scores", values: row.z[0] }];
  found.push({ label: state.mixing && layer.mixes[0] ? "h = z R1, addresses" : "h = z, addresses", values: row.h[0], dim: off, outline: state.mixing && layer.mixes[0] ? row.z[0] : null, marks: changed });
  if (layer.glu) found.push({ label: "softplus(h of the scale branch), strength", values: row.h[1].map(softplus), dim: off });
  found.push({ label: "a, hidden layer", values: row.a }, { label: "w = a R2ᵀ, readout weights of the tokens", values: row.w });
  return found;
}

function drawHidden() {
  const ok = readable();
  $("bands").hidden = !ok;
  if (!ok) return ($("hidden-note").textContent = "No slots here.");
  const bands = bandsNow(), n = bands[0].values.length, first = state.model === DIFFERENCE ? 0 : rowOf(state.model).first;
  const lag = state.order === "lag", order = (i) => (lag ? n - 1 - i : i);
  const axis = lag ? ["lag 0, the token itself", `lag ${n - 1}`] : [`token ${first}`, `token ${first + n - 1}`];
  const chosen = state.slot === null ? null : state.slot - first;
  const under = drawBands($("bands"), bands, n, order, chosen, axis);
  placeUnder = (px) => {
    const at = under(px);
    return at < 0 || at >= n ? -1 : first + (lag ? n - 1 - at : at);
  };
  $("bands").setAttribute("aria-label", `${sentence()} The table at the end of the page has all numbers.`);
  $("hidden-note").textContent = state.model === DIFFERENCE ? "" : hiddenNote();
}

function hiddenNote() {
  const row = rowOf(state.model), layer = layerOf(state.model);
  if (layer.kind !== "hyper") return "One bar per slot. Softmax attention is the same two-layer network with weights that are positive and sum to one.";
  const marks = layer.mixes[0] && state.mixing ? " In h, dashes are the scores before mixing; below it, green was switched on by mixing and red switched off." : "";
  return `One bar per slot, ${state.order === "lag" ? "newest first" : "oldest first"}; ρ = ${number(row.rho)}. Grey slots are not active.${marks}`;
}

function point(place) {
  document.querySelectorAll("#text .pointed").forEach((span) => span.classList.remove("pointed"));
  if (place < 0 || state.model === DIFFERENCE || !readable()) return;
  const row = rowOf(state.model), i = place - row.first;
  $("text").children[place].classList.add("pointed");
  const parts = [`z ${number(row.z[0][i])}`, `h ${number(row.h[0][i])}`, `a ${number(row.a[i])}`, `w ${number(row.w[i])}`, `share of the slot ${percent(row.share[i])}, of the token ${percent(row.tokenShare[i])}`];
  $("under").textContent = `“${spoken(place)}”, token ${place}, lag ${state.token - place}: ${parts.join(", ")}`;
}

const legendOf = (lines) => lines.map((line, k) => `<span class="line l${k}" style="--k:var(${line.colour})"></span>${line.label} &nbsp; `).join("");

function drawSlot() {
  const mixes = readable() && state.model !== DIFFERENCE && state.mixing && layerOf(state.model).mixes.some(Boolean);
  $("slot-card").hidden = !mixes;
  if (!mixes) return;
  const row = rowOf(state.model), [best] = largest(row.share, 1);
  const i = state.slot === null ? (best ?? row.n - 1) : state.slot - row.first;
  if (i < 0 || i >= row.n) return ($("slot-card").hidden = true);
  const found = [[row.R1[0], "R1, its address", "--a"], [row.R1[1], "R1 of the scale branch", "--b"], [row.R2, "R2, its content", "--c"]];
  const lines = found.filter(([op]) => op).map(([op, label, colour]) => ({ label, colour, values: columnOf(op, i).reverse(), own: op.D[i] }));
  const [main] = lines, made = largest(main.values, 4).map((lag) => `“${spoken(row.t - lag)}” ${number(main.values[lag])}`);
  $("slot-words").textContent = `The slot of “${spoken(row.first + i)}” (${lagWords(row, i)}) is a mixture of all tokens: ${main.label} is made of ${made.join(", ")}, …`;
  drawLines($("slot-lines"), lines);
  $("slot-lines").setAttribute("aria-label", `Lines by lag. ${$("slot-words").textContent}`);
  $("slot-legend").innerHTML = `How much of the token at each lag goes into this slot: &nbsp; ${legendOf(lines)}`;
}

function drawMixing() {
  const ok = readable() && state.model !== DIFFERENCE, layer = ok ? layerOf(state.model) : null;
  $("mixing-card").hidden = !ok;
  if (!ok) return;
  const has = layer.mixes.some(Boolean) && state.mixing;
  $("maps").replaceChildren();
  $("diagonals").hidden = $("diagonal-legend").hidden = !has;
  $("mixing-card").querySelector("h3").hidden = !has;
  if (!has) {
    const why = layer.mixes.some(Boolean) ? "Switched off: R1 = R2 = I." : "This layer does not mix along the sequence: R1 = R2 = I.";
    return ($("mixing-note").textContent = why);
  }
  const row = rowOf(state.model);
  const maps = [[row.R1[0], layer.glu ? "R1, gate branch" : "R1", false, "--a"], [row.R1[1], "R1, scale branch", false, "--b"], [row.R2, "R2", true, "--c"]].filter(([op]) => op);
  for (const [op, title, transpose] of maps) {
    const figure = document.createElement("figure"), caption = document.createElement("figcaption"), canvas = document.createElement("canvas");
    figure.append(caption, canvas);
    $("maps").append(figure);
    const { top, group } = drawMap(canvas, op, transpose);
    const controls = Array.from(op.s, (s) => s.toFixed(2)).join(" ");
    caption.innerHTML = `<b>${title}</b>: A Diag(s) Bᵀ, up to ${number(top)}${group > 1 ? `, means of ${group} × ${group} lags` : ""}`;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${title}: the low-rank part from lag to lag, largest entry ${number(top)}; controls s ${controls}`);
    canvas.title = `controls s: ${controls}`;
  }
  $("mixing-note").textContent = "R = D + A Diag(s) Bᵀ. Rows: from which lag; columns: to which; lag 0, the token itself, is top left. Blue adds, orange takes away. The controls s come from this token.";
  const lines = maps.map(([op, label, , colour]) => ({ label, colour, values: Array.from(op.D).reverse() }));
  drawLines($("diagonals"), lines);
  $("diagonals").setAttribute("aria-label", `D by lag: ${lines.map((l) => `${l.label} from ${number(l.values[0])} at lag 0 to ${number(l.values.at(-1))}`).join("; ")}`);
  $("diagonal-legend").innerHTML = legendOf(lines);
}

function drawAll() {
  if (!$("numbers").open || !readable()) return;
  const difference = state.model === DIFFERENCE, heads = ["token", "place", "lag"];
  const row = rowOf(shownModels()[0]), list = difference
    ? [[`share, ${name(0)}`, (i) => shareAt(0, i + row.first)], [`share, ${name(1)}`, (i) => shareAt(1, i + row.first)]]
    : [["z", (i) => row.z[0][i]], ["h", (i) => row.h[0][i]], ["a", (i) => row.a[i]], ["w", (i) => row.w[i]], ["slot share", (i) => row.share[i]], ["token share", (i) => row.tokenShare[i]]];
  const line = (_, i) => `<tr class="${row.active[i] ? "" : "off"}" data-c="${row.first + i}"><td class="token"></td><td>${row.first + i}</td><td>${row.t - row.first - i}</td>${list.map(([, get]) => `<td data-v="${get(i)}">${number(get(i))}</td>`).join("")}</tr>`;
  $("all").innerHTML = `<thead><tr>${[...heads, ...list.map(() => "")].map((h) => `<th scope="col">${h}</th>`).join("")}</tr></thead><tbody>${Array.from({ length: row.n }, line).join("")}</tbody>`;
  list.forEach(([title], j) => ($("all").tHead.rows[0].cells[heads.length + j].textContent = title));
  [...$("all").tBodies[0].rows].forEach((tr) => (tr.cells[0].textContent = spoken(Number(tr.dataset.c))));
}

// ---- putting it together ----

function draw() {
  palette.clear();
  $("sentence").textContent = sentence();
  drawText();
  drawHeads();
  drawStages();
  drawFive();
  drawNext();
  drawHidden();
  drawSlot();
  drawMixing();
  drawAll();
}

function change(changes) {
  const before = document.activeElement?.dataset ?? {}, key = before.l === undefined ? null : [before.m, before.l, before.h];
  Object.assign(state, changes);
  state.token = Math.min(Math.max(state.token, 0), T - 1);
  document.querySelector(`[name=colour][value=${state.colour}]`).checked = true;
  document.querySelector(`[name=order][value=${state.order}]`).checked = true;
  $("without").checked = !state.mixing;
  document.querySelectorAll("[name=model]").forEach((input) => (input.checked = input.value === String(state.model)));
  draw();
  if (key) document.querySelector(`.heads button[data-m="${key[0]}"][data-l="${key[1]}"][data-h="${key[2]}"]`)?.focus();
  const [m] = shownModels();
  history.replaceState(null, "", `#token=${state.token}&layer=${state.pick[m].layer + 1}&head=${state.pick[m].head + 1}`);
}

function pick(m, layer, head) {
  const layers = data.models[m].layers, l = (layer + layers.length) % layers.length, H = layers[l].heads || 1;
  state.pick[m] = { layer: l, head: (head + H) % H };
  change({ slot: null });
}

const cycle = (list, value) => list[(list.indexOf(value) + 1) % list.length];
const everyModel = () => (data.models.length > 1 ? [0, 1, DIFFERENCE] : [0]);

function nextSlot() {
  if (!readable() || state.model === DIFFERENCE) return;
  const row = rowOf(state.model), five = largest(row.share, 5).map((i) => row.first + i);
  change({ slot: cycle([...five, null], state.slot) });
}

function pressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, summary")) return;
  const [m] = shownModels(), { layer, head } = state.pick[m], far = event.shiftKey ? 10 : 1;
  const act = {
    ArrowLeft: () => change({ token: state.token - far, slot: null }),
    ArrowRight: () => change({ token: state.token + far, slot: null }),
    Home: () => change({ token: 0, slot: null }),
    End: () => change({ token: T - 1, slot: null }),
    ArrowUp: () => pick(m, layer - 1, head),
    ArrowDown: () => pick(m, layer + 1, head),
    h: () => pick(m, layer, head + 1),
    m: () => change({ mixing: !state.mixing }),
    o: () => change({ order: cycle(["time", "lag"], state.order) }),
    c: () => change({ colour: cycle(COLOURS, state.colour) }),
    s: nextSlot,
    d: () => change({ model: cycle(everyModel(), state.model), slot: null }),
    "?": () => $("help").click(),
  }[event.key];
  if (!act) return;
  event.preventDefault();
  act();
}

function listen() {
  document.addEventListener("keydown", pressed);
  $("controls").addEventListener("change", (event) => {
    const { name, value, checked } = event.target;
    if (name === "model") change({ model: value === DIFFERENCE ? value : Number(value), slot: null });
    else if (name) change({ [name]: value });
    else change({ mixing: !checked });
  });
  $("heads").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) pick(Number(button.dataset.m), Number(button.dataset.l), Number(button.dataset.h));
  });
  const choose = (tr) => tr && change({ slot: state.slot === Number(tr.dataset.c) ? null : Number(tr.dataset.c) });
  $("five").addEventListener("click", (event) => choose(event.target.closest("tbody tr")));
  $("five").addEventListener("keydown", (event) => event.key === "Enter" && choose(event.target.closest("tbody tr")));
  $("bands").addEventListener("mousemove", (event) => point(placeUnder(event.offsetX)));
  $("bands").addEventListener("click", (event) => {
    const place = placeUnder(event.offsetX);
    if (place >= 0) change({ slot: place });
    point(place);
  });
  $("help").addEventListener("click", () => {
    $("keys").hidden = !$("keys").hidden;
    $("help").setAttribute("aria-expanded", !$("keys").hidden);
  });
  $("theme").addEventListener("click", () => setTheme(cycle(["auto", "light", "dark"], document.documentElement.dataset.theme || "auto")));
  $("numbers").addEventListener("toggle", drawAll);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  new ResizeObserver(() => requestAnimationFrame(draw)).observe(document.querySelector("main"));
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").querySelector("span").textContent = theme;
  $("theme").setAttribute("aria-label", `Colours: ${theme === "auto" ? "as the system" : theme}`);
  draw();
}

function start() {
  $("about").textContent = data.about;
  if (data.models.length > 1) {
    $("models").hidden = false;
    for (const value of everyModel()) {
      const label = document.createElement("label"), input = Object.assign(document.createElement("input"), { type: "radio", name: "model", value });
      label.append(input, ` ${value === DIFFERENCE ? "difference" : name(value)}`);
      $("models").append(label);
    }
  }
  if (data.words) $("next-title").textContent = "What the model answers";
  buildText();
  listen();
  const wanted = new URLSearchParams(location.hash.slice(1));
  if (wanted.has("token")) state.token = Number(wanted.get("token"));
  const layers = data.models[0].layers, layer = Number(wanted.get("layer")) - 1, head = Number(wanted.get("head")) - 1;
  if (layers[layer] && head >= 0 && head < (layers[layer].heads || 1)) state.pick[0] = { layer, head };
  change({});
}

start();
