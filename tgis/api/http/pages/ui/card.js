// The tokens of an answer, under the pointer or by the arrow keys: how probable each was, and its candidates.

const card = byId('card');
let current = null; // the span whose tokens the card shows

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return share < 0.01 ? '< 0.01 %' : `${share.toFixed(share < 10 ? 2 : 1)} %`;
}

function visible(text) {
  const oneLine = text.replaceAll('\n', '↵').replaceAll('\t', '⇥');
  return oneLine.replace(/^ +| +$/g, (all) => '␣'.repeat(all.length));
}

function showCard(span) {
  if (span === current) return;
  hideCard();
  current = span;
  current.classList.add('current');
  const tokens = answers.get(span.closest('.answer')).tokens[span.dataset.index];
  card.replaceChildren(...tokens.flatMap(describe));
  card.showPopover();
  placeCard();
}

function placeCard() {
  const { left, top, bottom } = [...current.getClientRects()].at(-1); // of two lines the word is in the latter
  const below = bottom + card.offsetHeight < innerHeight;
  card.style.left = `${Math.max(8, Math.min(left, innerWidth - card.offsetWidth - 8))}px`;
  card.style.top = `${below ? bottom : Math.max(0, top - card.offsetHeight)}px`;
}

function hideCard() {
  current?.classList.remove('current');
  current = null;
  card.hidePopover();
}

function describe({ text, logprob, candidates }) {
  const said = logprob === null ? '' : percent(logprob);
  const heading = element('h2', {}, element('code', { textContent: visible(text) }), said);
  return [heading, element('ol', {}, ...candidates.map((each) => candidate(each, text)))];
}

function candidate([text, logprob], chosen) {
  const bar = element('meter', { value: Math.exp(logprob), ariaHidden: 'true' });
  const share = element('span', { textContent: percent(logprob) });
  const className = text === chosen ? 'chosen' : '';
  return element('li', { className }, element('code', { textContent: visible(text) }), bar, share);
}

function speak(span) {
  const tokens = answers.get(span.closest('.answer')).tokens[span.dataset.index];
  const said = tokens.map(({ text, logprob, candidates }) => {
    const others = candidates.filter(([other]) => other !== text);
    const not = others.map(([other, value]) => `, not ${visible(other)} ${percent(value)}`);
    return `${visible(text)} ${percent(logprob)}${not.join('')}`;
  });
  byId('spoken').textContent = said.join('; ');
}

function moveTo(answer, key) {
  const spans = answer.children;
  const at = current?.parentElement === answer ? Number(current.dataset.index) : -1;
  const index = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[key];
  if (index === undefined || !spans.length) return false;
  const span = spans[Math.max(0, Math.min(index, spans.length - 1))];
  span.scrollIntoView({ block: 'nearest' });
  showCard(span);
  speak(span);
  return true;
}
