//! Structured pruning: which layers and head groups a model can do without, measured, and a file without them.

mod damage;
mod export;

pub use damage::{Damage, DamageReport, Part, PruneOptions, choose_groups, choose_layers, measure};
pub use export::{PruneError, Pruned, export};

#[cfg(test)]
mod tests;
