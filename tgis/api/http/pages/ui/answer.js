// An answer while it grows: as Markdown, and with a span for each token. What the server says becomes text nodes, never
// markup.

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const ACTIONS = ['Copy', 'Regenerate', 'Edit', 'curl'];

class Answer {
  constructor(kind, question) {
    this.kind = kind;
    this.question = question;
    this.sent = null; // the body of the request
    this.text = '';
    this.tokens = []; // of each span: a character may need several
    this.cutter = new Cutter();
    this.aborter = new AbortController();
    this.usage = null;
    this.reason = null;
    this.log = byId(kind);
    this.element = element('div', { className: 'answer', tabIndex: 0, role: 'group' });
    this.element.ariaLabel = 'Answer. The arrow keys show how probable each token was.';
    this.page = element('div', { className: 'markdown' });
    this.rendered = new Rendered(this.page);
    this.frame = 0;
    this.thought = element('p');
    const summary = element('summary', { textContent: 'Thought' });
    this.fold = element('details', { className: 'thought', hidden: true }, summary, this.thought);
    this.facts = element('p', { className: 'facts' });
    const asked = element('div', { className: 'question', textContent: question });
    const buttons = ACTIONS.map((name) => element('button', { type: 'button', name: name.toLowerCase(), textContent: name }));
    const actions = element('div', { className: 'actions' }, ...buttons);
    this.article = element('article', { className: kind }, asked, this.fold, this.element, this.page, this.facts, actions);
    answers.set(this.element, this);
    answers.set(this.article, this);
    this.log.append(this.article);
  }

  begin() {
    this.started = performance.now();
    this.article.classList.add('running');
    this.log.ariaBusy = 'true'; // read when it is complete
    this.timer = setInterval(() => this.showFacts(), 500);
    this.showFacts();
    scrollToEnd(this.log, true);
  }

  // A text of an earlier visit, whose tokens are not known.
  restore(text) {
    this.text = text;
    this.element.append(text);
    this.rendered.show(text);
  }

  add({ choices, usage, error }) {
    if (error) throw Failure.from(error, error.http_status_code);
    this.usage = usage ?? this.usage;
    for (const choice of choices) {
      this.lastAt = performance.now();
      this.firstAt ??= this.lastAt;
      this.reason = choice.finish_reason ?? this.reason;
      if (choice.delta?.reasoning) {
        this.fold.hidden = false;
        this.thought.append(choice.delta.reasoning);
        continue;
      }
      const text = choice.text ?? choice.delta.content ?? '';
      this.text += text;
      this.cutter.add(text, tokensOf(choice.logprobs));
      this.addSpans();
    }
    this.frame ||= requestAnimationFrame(() => this.render());
  }

  render() {
    this.frame = 0;
    if (this.kind === 'chat') this.rendered.show(this.text);
    scrollToEnd(this.log);
  }

  addSpans(complete = false) {
    for (let part = this.cutter.next(complete); part; part = this.cutter.next(complete)) this.addSpan(...part);
    scrollToEnd(this.log);
  }

  addSpan(text, tokens) {
    if (!tokens.length) { // nothing is known about them
      this.element.append(text);
      return;
    }
    const className = text ? 'token' : 'token special';
    const span = element('span', { className, textContent: text || tokens.map((token) => token.text).join('') });
    const probability = Math.exp(Math.min(...tokens.map(({ logprob }) => logprob ?? 0), 0));
    span.dataset.p = [0.7, 0.3, 0.1].filter((bound) => probability < bound).length;
    span.dataset.index = this.tokens.push(tokens) - 1;
    this.element.append(span);
  }

  end(reason) {
    clearInterval(this.timer);
    this.addSpans(true);
    cancelAnimationFrame(this.frame);
    this.render();
    this.showFacts(reason ?? { length: 'cut at the limit', stop: 'complete' }[this.reason] ?? this.reason);
    this.article.classList.remove('running');
    this.log.ariaBusy = 'false';
    scrollToEnd(this.log);
  }

  showFacts(end = '') {
    const waited = (this.firstAt ?? performance.now()) - this.started;
    const count = this.tokens.flat().length;
    const counts = this.usage
      ? [`${this.usage.prompt_tokens} tokens in`, `${this.usage.completion_tokens} out`]
      : [`${count} tokens`];
    const first = this.firstAt ? `first after ${milliseconds(waited)}` : `waiting for ${milliseconds(waited)}`;
    const speed = count > 1 ? `${rate(count - 1, this.lastAt - this.firstAt)} tokens/s` : '';
    this.facts.textContent = [...counts, first, speed, end].filter(Boolean).join(' · ');
  }
}

// Cuts a text into the parts that its tokens have made. Text comes after its tokens: its last character waits for what
// may join it. A token of less than a character says U+FFFD, and a special token has no text.
class Cutter {
  text = '';
  tokens = [];

  add(text, tokens) {
    this.text += text;
    this.tokens.push(...tokens);
  }

  // A text and its tokens; null if more must come first.
  next(complete) {
    const { text, tokens } = this;
    if (!tokens.length) return complete && text ? this.take(text.length, 0) : null;
    const whole = tokens.findIndex((token) => !token.text.includes('\uFFFD'));
    if (whole === 0) return this.nextWhole(tokens[0].text, complete);
    const at = whole < 0 ? -1 : text.indexOf(tokens[whole].text, 1);
    if (at > 0) return this.take(at, whole);
    return complete ? this.take(text.length, whole < 0 ? tokens.length : whole) : null;
  }

  nextWhole(said, complete) {
    const at = this.text.indexOf(said);
    if (at >= 0) return this.take(at + said.length, 1);
    if (!said.startsWith(this.text)) return this.take(0, 1); // special
    return complete ? this.take(this.text.length, 1) : null;
  }

  take(length, count) {
    const taken = [this.text.slice(0, length), this.tokens.splice(0, count)];
    this.text = this.text.slice(length);
    return taken;
  }
}

const answers = new WeakMap(); // by their elements

function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map(({ token, logprob, top_logprobs }) => ({
      text: token,
      logprob,
      candidates: top_logprobs.map((each) => [each.token, each.logprob]),
    }));
  }
  return logprobs.tokens.map((text, index) => ({
    text,
    logprob: logprobs.token_logprobs[index],
    candidates: Object.entries(logprobs.top_logprobs?.[index] ?? {}).sort((a, b) => b[1] - a[1]),
  }));
}

function scrollToEnd(log, always = false) {
  const scroller = getComputedStyle(log).overflowY === 'auto' ? log : document.documentElement;
  const distance = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  if (always || distance < 120) scroller.scrollTop = scroller.scrollHeight;
}

const rate = (count, duration) => (duration > 0 ? ((1000 * count) / duration).toFixed(1) : '0');
const milliseconds = (count) => (count < 1000 ? `${count.toFixed(0)} ms` : `${(count / 1000).toFixed(1)} s`);
