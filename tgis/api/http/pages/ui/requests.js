// To the server, and what it answers. Addresses are relative: a proxy may serve this page under another path.

const LOST = 'The connection ended before the answer did.';

const byId = (id) => document.getElementById(id);
const form = byId('ask');
const field = form.elements;

class Failure extends Error {
  constructor(message, status = 0, param = null) {
    super(message);
    this.status = status;
    this.param = param;
  }

  static async of(response) {
    const text = await response.text();
    try {
      const { error } = JSON.parse(text);
      return Failure.from(error, response.status);
    } catch {
      return new Failure(`${response.status} ${response.statusText}`, response.status); // of a proxy
    }
  }

  static from(error, status) { // OpenAI's errors are objects, TGI's are texts
    return new Failure(String(error.message ?? error), status, error.param ?? null);
  }
}

async function request(path, body, signal) {
  const headers = { Accept: 'application/json' };
  if (field.token.value) headers.Authorization = `Bearer ${field.token.value}`;
  if (body) headers['Content-Type'] = 'application/json';
  const options = { method: body ? 'POST' : 'GET', headers, body: body && JSON.stringify(body), signal };
  const response = await reached(fetch(path, options), 'The server cannot be reached.');
  if (!response.ok) throw await Failure.of(response);
  return response;
}

async function reached(promise, otherwise) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === 'AbortError' ? error : new Failure(otherwise);
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { value, done } = await reached(reader.read(), LOST);
    if (done) throw new Failure(LOST);
    const parts = (rest + value).split('\n\n');
    rest = parts.pop();
    for (const part of parts) {
      if (part === 'data: [DONE]') return;
      if (part.startsWith('data: ')) yield JSON.parse(part.slice('data: '.length));
    }
  }
}
