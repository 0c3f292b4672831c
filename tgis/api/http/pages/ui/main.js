// What is served, what is asked, and what keys and buttons do.

const RETRY_MS = 2000;
const BATCH_MS = 2000;
const PARAMETERS = [
  'max_tokens', 'min_tokens', 'temperature', 'seed', 'top_p', 'top_k',
  'repetition_penalty', 'frequency_penalty', 'presence_penalty',
];

let turns = []; // of the chat: its answers, with their questions
let running = null; // the answer that is being generated
let edited = null; // the turn that the next message replaces
let connection = 0; // the latest: what an earlier one still waits for is ignored
let timer = 0; // of what the connection does next

async function connect() {
  clearTimeout(timer);
  const mine = ++connection;
  try {
    const { data } = await (await request('v1/models')).json();
    const info = await (await request('info')).json();
    if (mine !== connection) return;
    field.model.replaceChildren(...data.map(({ id }) => new Option(id)));
    const context = `${info.max_total_tokens.toLocaleString('en')} tokens of context`;
    byId('served').textContent = `${info.model_id} · ${info.model_dtype} on ${info.model_device_type} · ${context}`;
    byId('access').hidden = !field.token.value;
    showError(null);
    await tryTemplate();
    watchBatch(mine);
  } catch (error) {
    if (mine !== connection) return;
    byId('served').textContent = error.message;
    if (error.status === 401) askForToken(error);
    else timer = setTimeout(connect, RETRY_MS); // it is still loading, or away
  }
}

// Without a chat template there is no chat.
async function tryTemplate() {
  const [chat] = field.mode;
  try {
    await request('chat_tokenize', { messages: [{ role: 'user', content: '' }] });
    chat.disabled = false;
  } catch (error) {
    if (error.status !== 422) throw error;
    chat.disabled = true;
    chat.parentElement.title = error.message;
    field.mode.value = 'prompt';
  }
  switchMode();
}

function askForToken(error) {
  byId('access').hidden = false;
  byId('parameters').open = true;
  showError(error);
  field.token.focus();
}

let before = null; // what the previous snapshot said

async function watchBatch(mine) {
  if (mine !== connection) return;
  try {
    if (document.visibilityState === 'visible') await showBatch();
  } catch (error) {
    byId('batch').textContent = '';
    before = null;
    if ([401, 404].includes(error.status)) return; // it is off, or not for us
  }
  if (mine === connection) timer = setTimeout(watchBatch, BATCH_MS, mine);
}

async function showBatch() {
  const batch = await (await request('debug/batch')).json();
  const now = performance.now();
  const texts = [`${batch.num_running} running`, `${batch.num_waiting} waiting`];
  if (before) texts.push(`${rate(batch.total_generated_tokens - before.tokens, now - before.now)} tokens/s`);
  before = { tokens: batch.total_generated_tokens, now };
  byId('batch').textContent = texts.join(' · ');
  byId('batch').title = batch.wait_reason ?? '';
}

const mode = () => field.mode.value;

// Of a question that the chat has come to; `earlier` are its turns before.
function body(kind, question, earlier) {
  const number = ({ value }) => (value === '' ? undefined : Number(value));
  const given = Object.fromEntries(PARAMETERS.map((name) => [name, number(field[name])]));
  const stop = field.stop.value.split('\n').filter(Boolean).map((line) => line.replaceAll('\\n', '\n'));
  const candidates = number(field.top_logprobs) ?? 0;
  const schema = field.structured_outputs.value.trim();
  return {
    model: field.model.value,
    ...given,
    stop,
    structured_outputs: schema ? { json: schema } : undefined,
    stream: true,
    stream_options: { include_usage: true },
    ...(kind === 'chat' ? chatFields(question, earlier, candidates) : { prompt: question, logprobs: candidates }),
  };
}

function chatFields(question, earlier, candidates) {
  const said = (role, content) => ({ role, content });
  const system = field.system.value ? [said('system', field.system.value)] : [];
  const before = earlier.flatMap((turn) => [said('user', turn.question), said('assistant', turn.text)]);
  return { messages: [...system, ...before, said('user', question)], logprobs: true, top_logprobs: candidates };
}

const pathOf = ({ kind }) => (kind === 'chat' ? 'v1/chat/completions' : 'v1/completions');

// Whether there is an answer, if only a part of one.
async function ask(asked, question) {
  const answer = new Answer(asked, question);
  running = answer;
  answer.begin();
  setRunning(true);
  showError(null);
  try {
    answer.sent = body(asked, question, turns);
    if (asked === 'chat') turns.push(answer);
    const response = await request(pathOf(answer), answer.sent, answer.aborter.signal);
    for await (const chunk of events(response)) answer.add(chunk);
    answer.end();
  } catch (error) {
    if (error.name === 'AbortError') answer.end('stopped by you');
    else fail(error, answer);
  }
  running = null;
  setRunning(false);
  const begun = answer.element.hasChildNodes() || !answer.fold.hidden;
  if (!begun) { // its question may be asked again
    if (answer.article.isConnected) field.text.value ||= question; // it is not if it was cleared
    answer.article.remove();
    turns = turns.filter((turn) => turn !== answer);
  }
  keep();
  return begun;
}

// What a reload of the page brings back.
function keep() {
  const kept = { system: field.system.value, turns: turns.map(({ question, text }) => [question, text]) };
  try {
    if (turns.length) localStorage.setItem('chat', JSON.stringify(kept));
    else localStorage.removeItem('chat');
  } catch {} // there is no room for it, or the browser keeps nothing
}

function bringBack() {
  try {
    const { system, turns: kept } = JSON.parse(localStorage.getItem('chat'));
    field.system.value = system;
    for (const [question, text] of kept) {
      const answer = new Answer('chat', question);
      answer.restore(text);
      turns.push(answer);
    }
    scrollToEnd(byId('chat'), true);
  } catch {} // there is none
}

// A turn is replaced only together with those after it, which cannot be brought back.
function mayReplace(answer) {
  const later = answer.kind === 'chat' ? turns.length - 1 - turns.indexOf(answer) : 0;
  return later < 1 || confirm(`This also removes what follows in the chat: ${later} more answer${later > 1 ? 's' : ''}.`);
}

// The chat as it was before a turn; what came after is returned.
function cut(answer) {
  const cutOff = turns.slice(turns.indexOf(answer));
  for (const turn of cutOff) turn.article.remove();
  turns = turns.filter((turn) => !cutOff.includes(turn));
  edited = null;
  return cutOff;
}

// Asks in place of a turn and of those after it, which stay if nothing is answered. Returns whether there is an answer.
async function replace(answer, question) {
  const cutOff = answer.kind === 'chat' ? cut(answer) : [];
  if (await ask(answer.kind, question)) return true;
  for (const turn of cutOff) turn.log.append(turn.article);
  turns.push(...cutOff);
  keep();
  return false;
}

const ACTION = {
  copy: (answer, button) => copy(answer.text, button),

  edit(answer) {
    edited = answer.kind === 'chat' ? answer : null;
    field.text.value = answer.question;
    field.text.focus();
  },

  async regenerate(answer) {
    if (!mayReplace(answer)) return;
    const typed = field.text.value;
    if (!await replace(answer, answer.question)) field.text.value = typed;
  },

  curl(answer, button) {
    const shown = answer.article.querySelector('.curl');
    if (shown) return shown.remove();
    const sent = answer.sent ?? body(answer.kind, answer.question, turns.slice(0, turns.indexOf(answer)));
    const command = curlCommand(pathOf(answer), sent);
    answer.article.append(element('pre', { className: 'curl', tabIndex: 0, textContent: command }));
    return copy(command, button);
  },
};

function curlCommand(path, sent) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const parts = [`curl -N ${quoted(new URL(path, location).href)}`, "-H 'Content-Type: application/json'"];
  if (field.token.value) parts.push('-H "Authorization: Bearer $TOKEN"');
  return [...parts, `-d ${quoted(JSON.stringify(sent, null, 1))}`].join(' \\\n  ');
}

async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // only pages of https and of this machine have it
    const area = element('textarea', { value: text });
    document.body.append(area);
    area.select();
    document.execCommand('copy');
    area.remove();
    button.focus();
  }
  const { textContent } = button;
  if (textContent === 'Copied') return;
  button.textContent = 'Copied';
  setTimeout(() => { button.textContent = textContent; }, 1200);
}

function fail(error, answer) {
  answer.end('failed');
  if (error.status === 401) askForToken(error);
  else showError(error);
}

function showError(error) {
  for (const each of form.querySelectorAll('[aria-invalid]')) each.removeAttribute('aria-invalid');
  const shown = byId('error');
  shown.hidden = !error;
  shown.textContent = error?.message ?? '';
  const wrong = error?.param && form.querySelector(`#parameters [name="${CSS.escape(error.param)}"]`);
  if (!wrong) return;
  wrong.setAttribute('aria-invalid', 'true');
  byId('parameters').open = true;
}

function setRunning(on) { // the button stays where it is, and keeps the focus
  const send = byId('send');
  send.textContent = on ? 'Stop' : 'Send';
  send.type = on ? 'button' : 'submit';
  send.classList.toggle('stop', on);
}

function switchMode() {
  const chat = mode() === 'chat';
  hideCard();
  byId('chat').hidden = !chat;
  byId('prompt').hidden = chat;
  byId('system').hidden = !chat;
  form.querySelector('label[for=text]').textContent = chat ? 'Message' : 'Prompt';
  field.text.placeholder = chat ? 'Say something' : 'Once upon a time';
  byId('keys').textContent = chat ? 'Enter sends, Shift+Enter is a new line' : 'Ctrl+Enter sends';
}

form.addEventListener('submit', async (event) => {
  event.preventDefault();
  if (running) return;
  const question = field.text.value;
  const asked = mode();
  const turn = asked === 'chat' ? edited : null;
  if (turn && !mayReplace(turn)) return;
  if (asked === 'chat') field.text.value = '';
  if (!turn) await ask(asked, question);
  else if (!await replace(turn, question)) edited = turn;
});
field.text.addEventListener('input', () => { // without a text there is nothing left of the edit
  if (!field.text.value) edited = null;
});
form.addEventListener('invalid', ({ target }) => { // a field that is hidden cannot say so
  if (byId('parameters').contains(target)) byId('parameters').open = true;
}, true);
byId('send').addEventListener('click', (event) => {
  if (!running) return;
  event.preventDefault();
  running.aborter.abort();
});
byId('clear').addEventListener('click', () => {
  const log = byId(mode());
  if (running?.log === log) running.aborter.abort();
  if (mode() === 'chat') turns = [];
  edited = null;
  keep();
  hideCard();
  log.replaceChildren();
  showError(null);
  field.text.focus();
});
field.text.addEventListener('keydown', (event) => {
  const sends = event.ctrlKey || event.metaKey || (mode() === 'chat' && !event.shiftKey);
  if (event.key !== 'Enter' || event.isComposing || !sends) return;
  event.preventDefault();
  if (!running) form.requestSubmit();
});
for (const radio of field.mode) radio.addEventListener('change', switchMode);
field.token.addEventListener('change', () => {
  sessionStorage.setItem('token', field.token.value);
  connect();
});
byId('shade').addEventListener('change', showTokens);
document.addEventListener('click', ({ target }) => {
  if (target.matches('.copies')) copy(target.closest('.code').querySelector('code').textContent, target);
  if (target.matches('.actions button') && !running) ACTION[target.name](answers.get(target.closest('article')), target);
});
addEventListener('pagehide', () => running && keep()); // else it is kept, perhaps by another tab

document.addEventListener('pointerover', ({ target }) => {
  const span = target.closest('.token');
  if (span) showCard(span);
  else if (!target.closest('#card')) hideCard();
});
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape' && current) hideCard();
  else if (event.key === 'Escape') running?.aborter.abort();
  else if (event.target.matches('.answer') && moveTo(event.target, event.key)) event.preventDefault();
});
document.addEventListener('focusout', ({ target }) => target.matches('.answer') && hideCard());
document.addEventListener('scroll', () => current && placeCard(), true);

function showTokens() {
  hideCard();
  form.classList.toggle('shaded', byId('shade').checked);
}

field.token.value = sessionStorage.getItem('token') ?? '';
byId('parameters').open = matchMedia('(min-width: 60rem)').matches;
showTokens();
bringBack();
switchMode();
field.text.focus();
connect();
