// What is served, what is asked, and what keys and buttons do.

const RETRY_MS = 2000;
const BATCH_MS = 2000;
const PARAMETERS = [
  'max_tokens', 'min_tokens', 'temperature', 'seed', 'top_p', 'top_k',
  'repetition_penalty', 'frequency_penalty', 'presence_penalty',
];

const messages = []; // of the chat
let running = null; // the answer that is being generated
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

function body() {
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
    ...(mode() === 'chat' ? chatFields(candidates) : { prompt: field.text.value, logprobs: candidates }),
  };
}

function chatFields(candidates) {
  const system = field.system.value ? [{ role: 'system', content: field.system.value }] : [];
  const question = { role: 'user', content: field.text.value };
  return { messages: [...system, ...messages, question], logprobs: true, top_logprobs: candidates };
}

async function ask() {
  const asked = mode();
  const question = field.text.value;
  const answer = new Answer(asked, question);
  running = answer;
  setRunning(true);
  showError(null);
  const path = asked === 'chat' ? 'v1/chat/completions' : 'v1/completions';
  try {
    const sent = body();
    if (asked === 'chat') field.text.value = '';
    for await (const chunk of events(await request(path, sent, answer.aborter.signal))) answer.add(chunk);
    answer.end();
  } catch (error) {
    if (error.name === 'AbortError') answer.end('stopped by you');
    else fail(error, answer);
  }
  if (answer.article.isConnected) { // it is not if it was cleared
    if (!answer.element.hasChildNodes()) withdraw(answer, question);
    else if (asked === 'chat') remember(question, answer);
  }
  running = null;
  setRunning(false);
}

function fail(error, answer) {
  answer.end('failed');
  if (error.status === 401) askForToken(error);
  else showError(error);
}

// An answer that has not begun: its question may be asked again.
function withdraw(answer, question) {
  answer.article.remove();
  field.text.value ||= question;
}

function remember(question, answer) {
  messages.push({ role: 'user', content: question }, { role: 'assistant', content: answer.text });
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

form.addEventListener('submit', (event) => {
  event.preventDefault();
  if (!running) ask();
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
  if (mode() === 'chat') messages.length = 0;
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
byId('shade').addEventListener('change', ({ target }) => form.classList.toggle('shaded', target.checked));

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

field.token.value = sessionStorage.getItem('token') ?? '';
byId('parameters').open = matchMedia('(min-width: 60rem)').matches;
form.classList.toggle('shaded', byId('shade').checked);
switchMode();
field.text.focus();
connect();
