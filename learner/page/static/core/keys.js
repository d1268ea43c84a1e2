// Keys of the present view: j and k walk a list, Escape goes back. Keys that are typed into a field are the field's.
import { useEffect, useRef } from "./html.js";

function isTyping(target) {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName));
}

export function useKeys(handlers) {
  const current = useRef(handlers);
  current.current = handlers; // at once: an effect comes after the frame, and a key may come before it
  useEffect(() => {
    const onKey = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
      const handler = current.current[event.key];
      if (!handler) return;
      event.preventDefault();
      handler(event);
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
}
