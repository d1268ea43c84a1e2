// An exponential average over the points that there are, corrected for its start; 0 leaves the line as it is.
export function smooth(values, weight) {
  if (!weight) return values;
  let average = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    average = average * weight + value * (1 - weight);
    mass = mass * weight + (1 - weight);
    return average / mass;
  });
}

// What a logarithmic axis can show.
export function positive(values) {
  return values.map((value) => (value > 0 ? value : null));
}
