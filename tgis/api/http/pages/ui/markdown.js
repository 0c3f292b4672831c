// Markdown as elements. What the model says becomes text nodes in elements that are named here, never markup. Links go
// to http and https; there are no images, whose addresses would carry text away without a click.

const MAX_DEPTH = 6; // of lists and quotes in each other
const MAX_ROW = 2000; // characters
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]{0,30})/;
const HEADING = /^(#{1,6})[ \t]+(.*)$/s; // . is any character here, so that $ never fails and nothing is tried again
const RULE = /^ {0,3}([-*_])([ \t]*\1){2,}[ \t]*$/;
const ITEM = /^( {0,40})([-*+]|\d{1,9}[.)])([ \t]+|$)(.*)$/s;
const DASHES = /^:?-+:?$/; // a cell below a table's head
const INLINE = new RegExp([
  /\\([\\`*_{}[\]()#+.!|>~-])/, // 1: a character as it is
  /``([^\n]{1,500}?)``|`([^`\n]{1,1000})`/, // 2, 3: code
  /\*\*(?=\S)([^\n]{1,500}?)(?<=\S)\*\*/, // 4: bold
  /\*(?=[^\s*])([^*\n]{1,500}?)(?<=\S)\*|(?<!\w)_(?=[^\s_])([^_\n]{1,500}?)(?<=\S)_(?!\w)/, // 5, 6: italic
  /(?<!!)\[([^[\]\n]{1,300})\]\(([^\s<>()]{1,2000}(?:\([^\s<>()]{0,200}\)[^\s<>()]{0,200})?)(?: "[^"\n]{0,200}")?\)/, // 7, 8: a link
  /(https?:\/\/[^\s<>()"'`\]]{1,2000})(?<![.,;:!?*_])/, // 9: an address
].map(({ source }) => source).join('|'), 'g');

// Shows a text that grows. What comes next may belong to the last two blocks, but to none before.
class Rendered {
  constructor(parent) {
    this.parent = parent;
    this.kept = 0; // blocks that are complete
    this.start = 0; // of the next one in the text
  }

  show(text) {
    const lines = text.slice(this.start).split('\n');
    const starts = [];
    let start = this.start;
    while (this.parent.children.length > this.kept) this.parent.lastChild.remove();
    for (let at = 0; at < lines.length;) {
      const [made, next] = block(lines, at, 0);
      if (made) {
        this.parent.append(made);
        starts.push(start);
      }
      start += lines.slice(at, next).join('\n').length + 1;
      at = next;
    }
    if (starts.length <= 2) return;
    this.kept += starts.length - 2;
    this.start = starts.at(-2);
  }
}

function blocks(lines, depth) {
  const made = [];
  for (let at = 0, one; at < lines.length;) {
    [one, at] = block(lines, at, depth);
    if (one) made.push(one);
  }
  return made;
}

// The block that begins at a line, null if there is none, and where the next one begins.
function block(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const heading = HEADING.exec(line);
  if (heading) return [element(`h${Math.min(heading[1].length + 2, 6)}`, {}, ...inline(heading[2])), at + 1];
  if (RULE.test(line)) return [element('hr'), at + 1];
  if (FENCE.test(line)) return fenced(lines, at);
  if (line[0] === '>' && depth < MAX_DEPTH) return quote(lines, at, depth);
  if (ITEM.test(line) && depth < MAX_DEPTH) return list(lines, at, depth);
  if (beginsTable(lines, at)) return table(lines, at);
  return paragraph(lines, at);
}

function endOf(lines, at, goesOn) {
  while (at < lines.length && goesOn(lines[at])) at += 1;
  return at;
}

function fenced(lines, at) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const closes = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], '');
  const end = endOf(lines, at + 1, (line) => !closes(line));
  const code = element('code', { textContent: lines.slice(at + 1, end).join('\n') });
  const copies = element('button', { type: 'button', className: 'copies', textContent: 'Copy' });
  const head = element('div', { className: 'row' }, element('small', { textContent: language }), copies);
  return [element('div', { className: 'code' }, head, element('pre', { tabIndex: 0 }, code)), end + 1];
}

function quote(lines, at, depth) {
  const end = endOf(lines, at, (line) => line[0] === '>');
  const inner = lines.slice(at, end).map((line) => line.replace(/^> ?/, ''));
  return [element('blockquote', {}, ...blocks(inner, depth + 1)), end];
}

function list(lines, at, depth) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(marker);
  const made = element(ordered ? 'ol' : 'ul', ordered ? { start: parseInt(marker, 10) } : {});
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length > indent.length + 1 || /\d/.test(item[2]) !== ordered || RULE.test(lines[at])) break;
    const end = endOfItem(lines, at + 1, item[1].length);
    const width = item[1].length + item[2].length + 1;
    const rest = lines.slice(at + 1, end).map((line) => line.slice(Math.min(width, line.search(/\S|$/))));
    const inner = blocks([item[4], ...rest], depth + 1);
    if (inner[0]?.tagName === 'P') inner.splice(0, 1, ...inner[0].childNodes);
    made.append(element('li', {}, ...inner));
    at = end;
  }
  return [made, at];
}

// Lines that are indented, empty ones between them, and what follows without an empty line.
function endOfItem(lines, at, indent) {
  const isDeeper = (line) => line.search(/\S|$/) > indent + 1;
  for (; at < lines.length; at += 1) {
    const line = lines[at];
    const next = lines[at + 1] ?? '';
    if (isDeeper(line)) continue;
    if (line.trim() ? !lines[at - 1].trim() || begins(line) : !next.trim() || !(isDeeper(next) || ITEM.test(next))) break;
  }
  return at;
}

const begins = (line) => [FENCE, HEADING, ITEM, RULE].some((pattern) => pattern.test(line)) || line[0] === '>';

function beginsTable(lines, at) {
  const next = lines[at + 1] ?? '';
  return lines[at].includes('|') && next.includes('-') && next.length < MAX_ROW && cells(next).every((cell) => DASHES.test(cell));
}

const cells = (line) => line.trim().replace(/^\||\|$/g, '').split('|').map((cell) => cell.trim());

function table(lines, at) {
  const end = endOf(lines, at + 2, (line) => line.includes('|') && line.length < MAX_ROW);
  const row = (line, tag) => element('tr', {}, ...cells(line).map((cell) => element(tag, {}, ...inline(cell))));
  const rows = [row(lines[at], 'th'), ...lines.slice(at + 2, end).map((line) => row(line, 'td'))];
  return [element('div', { className: 'wide', tabIndex: 0 }, element('table', {}, ...rows)), end];
}

function paragraph(lines, at) {
  const end = endOf(lines, at + 1, (line) => line.trim() && !begins(line));
  return [element('p', {}, ...inline(lines.slice(at, end).join('\n'))), end];
}

function inline(text, depth = 0) {
  const made = [];
  let end = 0;
  for (const found of depth < MAX_DEPTH ? text.matchAll(INLINE) : []) {
    made.push(text.slice(end, found.index), inlineElement(found, depth + 1));
    end = found.index + found[0].length;
  }
  return [...made, text.slice(end)];
}

function inlineElement([all, escaped, code2, code, bold, star, underscore, label, address, bare], depth) {
  if (escaped) return escaped;
  if (code2 ?? code) return element('code', { textContent: (code2 ?? code).trim() });
  if (bold) return element('strong', {}, ...inline(bold, depth));
  if (star ?? underscore) return element('em', {}, ...inline(star ?? underscore, depth));
  return link(address ?? bare, label ?? bare) ?? all;
}

// null for an address that is not of http or https. Whose page it is can be read before it is followed.
function link(address, label) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!['http:', 'https:'].includes(url?.protocol)) return null;
  const properties = { href: url.href, title: url.href, target: '_blank', rel: 'noopener noreferrer nofollow' };
  return element('a', { ...properties, textContent: label });
}
