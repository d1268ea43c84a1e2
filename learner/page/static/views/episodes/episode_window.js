// The episodes that match, in order: their numbers as one index, their rows in windows as they come into sight.
import { useCallback, useEffect, useMemo, useRef, useState } from "../../core/html.js";
import { ledgerRevision } from "../../data/live.js";
import { source } from "../../data/source.js";
import { useRequest } from "../../data/use_request.js";
import { REFRESH_MS, useThrottled } from "../../data/use_throttled.js";

const FIRST = 100;
const MOST_AT_ONCE = 200;

// The first rows come with the counts. The index of all is asked for when the reader goes beyond them; rows there are asked for
// by their numbers.
function useIndex(run, filters, revision) {
  const asked = `${run} ${JSON.stringify(filters)}`;
  const [deep, setDeep] = useState(null);
  const head = useRequest(asked, (signal) => source.episodes(run, { ...filters, limit: FIRST }, signal), revision);
  const index = useRequest(deep === asked ? asked : null, (signal) => source.order(run, filters, signal), revision);
  const seqs = useMemo(() => {
    if (index.answered?.startsWith(`${asked} `)) return index.data ?? [];
    return head.data?.episodes.map((one) => one.seq) ?? [];
  }, [asked, index.data, head.data]);
  return { head, seqs, goDeep: () => setDeep(asked) };
}

// Rows by number, each with the answer of which it is; one of an earlier answer is shown until the new one is there. `revision`:
// that of the head, so that its rows are not asked for twice.
function useRows(run, head, revision) {
  const rows = useRef(new Map());
  const stamps = useRef(new Map());
  const [, drawAgain] = useState(0);
  const keep = (episodes) => episodes.forEach((one) => {
    rows.current.set(one.seq, one);
    stamps.current.set(one.seq, revision);
  });
  useMemo(() => head && keep(head.episodes), [head]);
  const fetchRows = useCallback(async (seqs) => {
    const missing = seqs.filter((seq) => stamps.current.get(seq) !== revision).slice(0, MOST_AT_ONCE);
    if (!missing.length) return;
    missing.forEach((seq) => stamps.current.set(seq, revision));
    const { episodes } = await source.episodes(run, { seqs: missing.join(",") });
    keep(episodes);
    drawAgain((n) => n + 1);
  }, [run, revision]);
  return { rows: rows.current, fetchRows };
}

export function useEpisodeWindow(run, filters, { hold }) {
  const revision = useThrottled(ledgerRevision);
  // While the reader is further down, rows that are new at the top would move what is read: they wait.
  const [released, setReleased] = useState(revision);
  const shown = useRef(revision);
  shown.current = hold ? Math.max(shown.current, released) : revision;
  const drawn = shown.current;
  const [again, setAgain] = useState(0);
  const { head, seqs, goDeep } = useIndex(run, filters, `${drawn} ${again}`);
  // Breaks are looked for in the background: a list by cause is asked for again until all are known.
  const grows = Boolean(filters.cause) && head.data?.indexed < 1;
  useEffect(() => {
    if (!grows) return undefined;
    const timer = setTimeout(() => setAgain(again + 1), REFRESH_MS);
    return () => clearTimeout(timer);
  }, [grows, again]);
  const { rows, fetchRows } = useRows(run, head.data, head.answered);
  const show = useCallback((first, last) => {
    if (last > FIRST) goDeep();
    fetchRows(Array.from(seqs.slice(first, last))).catch(() => null); // the request of the head tells what is wrong
  }, [seqs, fetchRows]);
  return { head, seqs, count: Math.max(head.data?.total ?? 0, seqs.length), rows, show, isBehind: drawn !== revision, refresh: () => setReleased(revision) };
}
