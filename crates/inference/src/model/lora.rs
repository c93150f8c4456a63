//! Low-rank adapters (arXiv 2106.09685) applied while running.

use super::{Adapter, ModelConfig, ModelError, Target as Site};
use crate::linalg::{Packed, Storage};

/// One adapted matrix: `y += (x · Aᵀ) · Bᵀ`, the scale already inside `B`.
#[derive(Debug)]
pub(crate) struct Pair {
    a: Packed,
    b: Packed,
}

/// The adapter of a model, `[layer][site]`.
#[derive(Debug)]
pub(crate) struct Lora {
    layers: Vec<[Option<Pair>; Site::ALL.len()]>,
}

impl Lora {
    pub fn new(config: &ModelConfig, adapter: &Adapter) -> Result<Self, ModelError> {
        adapter.check_shapes(config)?;
        let mut layers: Vec<_> = (0..config.layers).map(|_| Default::default()).collect();
        for (layer, site, pair) in adapter.pairs() {
            let (_, inputs) = site.shape(config);
            let scaled: Vec<f32> = pair.b.iter().map(|b| b * adapter.scale(pair.rank)).collect();
            let name = site.tensor(layer);
            let pack = |values: &[f32], cols: usize, part: &str| {
                Packed::stack(&[values], cols, Storage::F32)
                    .map_err(|at| ModelError::weight(format!("{name}.{part}"), format!("value {at} is not finite")))
            };
            let pair = Pair { a: pack(&pair.a, inputs, "lora_a")?, b: pack(&scaled, pair.rank, "lora_b")? };
            let slots: &mut [Option<Pair>; Site::ALL.len()] = &mut layers[layer];
            slots[site as usize] = Some(pair);
        }
        Ok(Self { layers })
    }

    /// Adds the change at `site` to columns `at..` of `y` (`stride` values per row).
    #[allow(clippy::too_many_arguments, reason = "a matrix product and where it goes")]
    pub fn add(&self, layer: usize, site: Site, x: &[f32], m: usize, y: &mut [f32], at: usize, stride: usize) {
        if let Some(pair) = &self.layers[layer][site as usize] {
            let mut u = vec![0.0; m * pair.a.rows()];
            pair.a.forward(x, m, &mut u, false);
            pair.b.forward_at(&u, m, y, at, stride, true);
        }
    }
}
