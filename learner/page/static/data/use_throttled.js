// A signal that changes often, read at most once in a while: the last value always arrives.
import { useEffect, useRef, useState } from "../core/html.js";

export function useThrottled(source, milliseconds) {
  const [value, setValue] = useState(source.peek());
  const timer = useRef(null);
  const last = useRef(0);
  useEffect(() => {
    const stop = source.subscribe((now) => {
      if (timer.current !== null) return;
      const wait = Math.max(0, milliseconds - (Date.now() - last.current));
      if (wait === 0) {
        last.current = Date.now();
        setValue(now);
        return;
      }
      timer.current = setTimeout(() => {
        timer.current = null;
        last.current = Date.now();
        setValue(source.peek());
      }, wait);
    });
    return () => {
      stop();
      clearTimeout(timer.current);
      timer.current = null;
    };
  }, [source, milliseconds]);
  return value;
}
