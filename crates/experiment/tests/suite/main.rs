//! Whole-crate tests: reference values, gates on synthetic fleets, planner rules, properties, seeded simulations.

#[cfg(test)]
mod gates;
#[cfg(test)]
mod offline;
#[cfg(test)]
mod oracles;
#[cfg(test)]
mod planner_rules;
#[cfg(test)]
mod properties;
#[cfg(test)]
mod simulate;
#[cfg(test)]
mod support;
#[cfg(test)]
mod windows;
