// The episodes that match, in order: their numbers as one index, their rows in windows as they come into sight.
import { useCallback, useEffect, useMemo, useRef, useState } from "../../core/html.js";
import { ledgerRevision } from "../../data/live.js";
import { source } from "../../data/source.js";
import { useRequest } from "../../data/use_request.js";
import { useThrottled } from "../../data/use_throttled.js";

const FIRST = 100;
const MOST_AT_ONCE = 200;
const REFRESH_MS = 1500;

// The first rows come with the counts, at once with the index of all; rows beyond them are asked for by their numbers.
function useIndex(run, filters, revision) {
  const asked = JSON.stringify(filters);
  const head = useRequest(`${run} ${asked} ${revision}`, (signal) => source.episodes(run, { ...filters, limit: FIRST }, signal));
  const index = useRequest(`${run} ${asked} ${revision}`, (signal) => source.order(run, filters, signal));
  return { head, index };
}

// Rows by number. What the head brought replaces what was there: a state may have changed.
function useRows(run, head) {
  const rows = useRef(new Map());
  const [, drawAgain] = useState(0);
  const asking = useRef(new Set());
  useMemo(() => head?.episodes.forEach((one) => rows.current.set(one.seq, one)), [head]);
  const fetchRows = useCallback(async (seqs) => {
    const missing = seqs.filter((seq) => !rows.current.has(seq) && !asking.current.has(seq)).slice(0, MOST_AT_ONCE);
    if (!missing.length) return;
    missing.forEach((seq) => asking.current.add(seq));
    try {
      const { episodes } = await source.episodes(run, { seqs: missing.join(",") });
      episodes.forEach((one) => rows.current.set(one.seq, one));
      drawAgain((n) => n + 1);
    } finally {
      missing.forEach((seq) => asking.current.delete(seq));
    }
  }, [run]);
  return { rows: rows.current, fetchRows };
}

export function useEpisodeWindow(run, filters, { hold }) {
  const revision = useThrottled(ledgerRevision, REFRESH_MS);
  const [drawn, setDrawn] = useState(revision);
  // While the reader is further down, rows that are new at the top would move what is read: they wait.
  useEffect(() => {
    if (!hold) setDrawn(revision);
  }, [revision, hold]);
  const { head, index } = useIndex(run, filters, drawn);
  const { rows, fetchRows } = useRows(run, head.data);
  const seqs = index.data ?? head.data?.episodes.map((one) => one.seq) ?? [];
  const stale = useRef(drawn);
  const show = useCallback((first, last) => {
    const wanted = Array.from(seqs.slice(first, last));
    if (stale.current !== drawn) {
      stale.current = drawn;
      if (first > FIRST) wanted.forEach((seq) => rows.delete(seq));
    }
    fetchRows(wanted).catch(() => null); // the request of the head tells what is wrong
  }, [seqs, drawn]);
  return { head, seqs, rows, show, isBehind: drawn !== revision, refresh: () => setDrawn(revision) };
}
