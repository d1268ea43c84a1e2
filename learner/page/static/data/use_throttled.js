// A signal that changes often, read at most once in a while: the last value always arrives.
import { useEffect, useRef, useState } from "../core/html.js";

// The server tells what is new every second, or less often: what is so old is asked for again with what it tells, and drawn with
// it, and not a moment later by a clock of its own.
const OLD_MS = 1500;
export const REFRESH_MS = 2000;

export function useThrottled(source) {
  const [value, setValue] = useState(source.peek());
  const timer = useRef(null);
  const last = useRef(0);
  useEffect(() => {
    const take = () => {
      clearTimeout(timer.current);
      timer.current = null;
      last.current = Date.now();
      setValue(source.peek());
    };
    const stop = source.subscribe(() => {
      const age = Date.now() - last.current;
      if (age >= OLD_MS) take();
      else timer.current ??= setTimeout(take, REFRESH_MS - age);
    });
    return () => {
      stop();
      clearTimeout(timer.current);
      timer.current = null;
    };
  }, [source]);
  return value;
}
