// Whether an element is in sight, or soon will be: one observer for all that ask.
const told = new WeakMap();
const observer = new IntersectionObserver((entries) => entries.forEach((one) => told.get(one.target)?.(one.isIntersecting)), { rootMargin: "60px" });

// `tell(isSeen)`: at first, and whenever it changes; the answer ends it.
export function watchSight(element, tell) {
  told.set(element, tell);
  observer.observe(element);
  return () => observer.unobserve(element);
}
