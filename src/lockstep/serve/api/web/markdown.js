// Markdown to elements. Everything a model writes becomes text nodes: nothing is ever parsed as HTML.
//
// render(source, write, from) calls write(parent, from, to) for each stretch of source that is shown, so that the caller
// can mark its tokens. What is not Markdown of the kinds below is shown as it stands. It gives the elements of source from
// `from` on, how many of them nothing that follows can change, and where the first that may change begins.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

export function render(source, write, from) {
  const root = document.createDocumentFragment();
  const rows = lines(source, from);
  const starts = []; // of each element of the root
  blocks(rows, root, { source, write }, (at) => starts.push(at));
  // The last line may go on, and become part of what is before it.
  const open = starts.findLastIndex((at) => at < rows.at(-1)[0]);
  return { root, settled: Math.max(open, 0), from: open < 0 ? from : starts[open] };
}

// Each line from `from` on: [from, to] in the source, without its line break.
function lines(source, from) {
  const found = [];
  while (from <= source.length) {
    const at = source.indexOf("\n", from);
    const to = at < 0 ? source.length : at;
    found.push([from, to]);
    from = to + 1;
  }
  return found;
}

function blocks(rows, parent, page, begun) {
  const text = (row) => page.source.slice(row[0], row[1]);
  let i = 0;
  while (i < rows.length) {
    const line = text(rows[i]);
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (line.trim()) begun?.(rows[i][0]);
    if (!line.trim()) {
      i += 1;
    } else if (fence) {
      i = code(rows, i, fence, parent, page);
    } else if (heading) {
      const element = add(parent, `h${Math.min(heading[1].length, 4)}`);
      inline(element, rows[i][0] + heading[0].length, rows[i][1], page);
      i += 1;
    } else if (RULE.test(line)) {
      add(parent, "hr");
      i += 1;
    } else if (QUOTE.test(line)) {
      const inner = [];
      for (; i < rows.length && QUOTE.test(text(rows[i])); i += 1) {
        inner.push([rows[i][0] + QUOTE.exec(text(rows[i]))[0].length, rows[i][1]]);
      }
      blocks(inner, add(parent, "blockquote"), page);
    } else if (ITEM.test(line)) {
      i = list(rows, i, parent, page);
    } else if (line.includes("|") && i + 1 < rows.length && DIVIDER.test(text(rows[i + 1])) && text(rows[i + 1]).includes("-")) {
      i = table(rows, i, parent, page);
    } else {
      const begin = i;
      do i += 1;
      while (i < rows.length && text(rows[i]).trim() && !starts(text(rows[i])));
      const element = add(parent, "p");
      for (let row = begin; row < i; row += 1) {
        if (row > begin) add(element, "br");
        inline(element, rows[row][0], rows[row][1], page);
      }
    }
  }
}

function starts(line) {
  return FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || ITEM.test(line) || RULE.test(line);
}

function code(rows, at, fence, parent, page) {
  const close = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
  let end = at + 1;
  while (end < rows.length && !close.test(page.source.slice(...rows[end]))) end += 1;
  const box = add(parent, "div");
  box.className = "code";
  const element = add(add(box, "pre"), "code");
  if (fence[2]) element.dataset.language = fence[2];
  for (let row = at + 1; row < end; row += 1) {
    page.write(element, rows[row][0], rows[row][1]);
    if (row + 1 < end) element.append("\n");
  }
  return end + 1;
}

function list(rows, at, parent, page) {
  const text = (row) => page.source.slice(row[0], row[1]);
  const first = ITEM.exec(text(rows[at]));
  const ordered = /\d/.test(first[2]);
  const element = add(parent, ordered ? "ol" : "ul");
  if (ordered) element.start = parseInt(first[2], 10);
  let i = at;
  while (i < rows.length) {
    const item = ITEM.exec(text(rows[i]));
    if (!item || item[1].length !== first[1].length || /\d/.test(item[2]) !== ordered) break;
    const inner = [[rows[i][0] + item[0].length, rows[i][1]]];
    for (i += 1; i < rows.length; i += 1) {
      const line = text(rows[i]);
      const indent = /^\s*/.exec(line)[0].length;
      const more = line.trim() ? indent > first[1].length : i + 1 < rows.length && /^\s/.test(text(rows[i + 1]));
      if (!more) break;
      inner.push([rows[i][0] + Math.min(indent, item[0].length), rows[i][1]]);
    }
    const entry = add(element, "li");
    const holder = document.createDocumentFragment();
    blocks(inner, holder, page);
    // A single paragraph needs no margins of its own.
    if (holder.firstElementChild?.tagName === "P") entry.append(...holder.firstElementChild.childNodes), holder.firstElementChild.remove();
    entry.append(holder);
  }
  return i;
}

function table(rows, at, parent, page) {
  const element = add(parent, "table");
  let i = at;
  for (; i < rows.length && page.source.slice(...rows[i]).includes("|"); i += 1) {
    if (i === at + 1) continue;
    const row = add(element, "tr");
    for (const [from, to] of cells(page.source, rows[i])) inline(add(row, i === at ? "th" : "td"), from, to, page);
  }
  return i;
}

function cells(source, [from, to]) {
  const found = [];
  while (from < to && /\s/.test(source[from])) from += 1;
  if (source[from] === "|") from += 1;
  while (from < to) {
    const bar = source.indexOf("|", from);
    const end = bar < 0 || bar > to ? to : bar;
    if (bar >= 0 && bar <= to || source.slice(from, end).trim()) found.push([from, end]);
    from = end + 1;
  }
  return found;
}

const INLINE = [
  [/^(`+)([\s\S]*?[^`])\1(?!`)/, (m) => ["code", m[1].length, m[2].length, true]],
  [/^(\*\*|__)(?=\S)([\s\S]*?\S)\1/, (m) => ["strong", 2, m[2].length]],
  [/^\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)/, (m) => ["em", 1, m[1].length]],
  [/^_(?=[^\s_])([\s\S]*?[^\s_])_(?!\w)/, (m, before) => (/\w/.test(before) ? null : ["em", 1, m[1].length])],
  [/^~~(?=\S)([\s\S]*?\S)~~/, (m) => ["del", 2, m[1].length]],
];
const LINK = /^\[([^\]]+)\]\((https?:\/\/[^\s()]+|mailto:[^\s()]+)\)/;
const BARE = /^https?:\/\/[^\s<>()\[\]"'`*]+[^\s<>()\[\]"'`*.,;:!?]/;

function inline(parent, from, to, page) {
  let plain = from;
  let at = from;
  const flush = (end) => {
    if (end > plain) page.write(parent, plain, end);
  };
  while (at < to) {
    if (page.source[at] === "\\" && /[\\`*_{}[\]()#+\-.!~|>]/.test(page.source[at + 1] ?? "") && at + 1 < to) {
      flush(at);
      plain = at + 1;
      at += 2;
      continue;
    }
    const took = "`*_~[h".includes(page.source[at]) ? special(parent, at, to, page, () => flush(at)) : 0;
    at += took || 1;
    if (took) plain = at;
  }
  flush(to);
}

// Handles what begins at `at`; gives its length, 0 when it is plain text.
function special(parent, at, to, page, flush) {
  const rest = page.source.slice(at, to);
  const before = page.source[at - 1] ?? " ";
  for (const [pattern, read] of INLINE) {
    const match = pattern.exec(rest);
    const found = match && read(match, before);
    if (found) {
      flush();
      const [tag, skip, length, raw] = found;
      const element = add(parent, tag);
      if (raw) page.write(element, at + skip, at + skip + length);
      else inline(element, at + skip, at + skip + length, page);
      return match[0].length;
    }
  }
  const link = LINK.exec(rest);
  const bare = /\w/.test(before) ? null : BARE.exec(rest);
  if (!link && !bare) return 0;
  flush();
  const element = add(parent, "a");
  element.href = link ? link[2] : bare[0];
  element.target = "_blank";
  element.rel = "noopener noreferrer nofollow";
  if (link) inline(element, at + 1, at + 1 + link[1].length, page);
  else page.write(element, at, at + bare[0].length);
  return (link ?? bare)[0].length;
}

function add(parent, tag) {
  const element = document.createElement(tag);
  parent.append(element);
  return element;
}
