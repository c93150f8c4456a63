//! The residual stream of calibration texts, moved through a model block by block: one block is in memory.

use crate::gguf::Gguf;
use crate::model::{Decoder, ModelConfig, ModelError, Site, Step};

/// Gets the number of a text, a site and the rows there.
pub(crate) type See<'a> = dyn FnMut(usize, Site, &[f32]) -> Result<(), ModelError> + 'a;

/// Calibration texts on their way through a model.
pub(crate) struct Stream<'a> {
    width: usize,
    texts: &'a [Vec<u32>],
    /// Residual stream of each text, one row a token.
    hidden: Vec<Vec<f32>>,
}

/// Names the tensor whose input is broken.
pub(crate) fn broken(tensor: &str, chunk: usize, column: usize, value: f32) -> ModelError {
    ModelError::NotFinite {
        place: format!("column {column} of the input of `{tensor}` in calibration chunk {chunk} ({value})"),
        hint: "the weights before it overflow: check the base model",
    }
}

impl<'a> Stream<'a> {
    /// The embedded texts.
    ///
    /// # Errors
    /// [`ModelError::Input`] for no texts, empty ones, ones longer than the context, or unknown tokens.
    pub fn new(gguf: &Gguf, config: &ModelConfig, texts: &'a [Vec<u32>]) -> Result<Self, ModelError> {
        if texts.is_empty() {
            return Err(ModelError::input("there is no calibration text"));
        }
        for (i, text) in texts.iter().enumerate() {
            config.check_tokens(text, &format!("calibration chunk {i}"))?;
        }
        let tensor = gguf.tensor("token_embd.weight")?;
        let row_bytes = tensor.len / config.vocab;
        let bytes = gguf.bytes(tensor);
        let embed = |text: &Vec<u32>| -> Result<Vec<f32>, ModelError> {
            let mut rows = vec![0.0; text.len() * config.width];
            for (token, row) in text.iter().zip(rows.chunks_exact_mut(config.width)) {
                let raw = &bytes[*token as usize * row_bytes..][..row_bytes];
                crate::codec::dequantize_into(tensor.ty, raw, row)
                    .map_err(|e| ModelError::weight(&tensor.name, e.to_string()))?;
            }
            Ok(rows)
        };
        let hidden = texts.iter().map(embed).collect::<Result<_, _>>()?;
        Ok(Self { width: config.width, texts, hidden })
    }

    /// The residual stream, text by text.
    pub fn hidden(&self) -> &[Vec<f32>] {
        &self.hidden
    }

    /// Runs a block over all texts and shows `see(text, site, rows)`; the stream itself stays where it is.
    ///
    /// # Errors
    /// What `see` returned.
    pub fn look(&self, block: &Decoder, see: &mut See<'_>) -> Result<(), ModelError> {
        for (i, text) in self.texts.iter().enumerate() {
            self.run(block, i, text, see)?;
        }
        Ok(())
    }

    /// Runs a block over all texts and moves the stream behind it.
    ///
    /// # Errors
    /// What `see` returned.
    pub fn advance(&mut self, block: &Decoder, see: &mut See<'_>) -> Result<(), ModelError> {
        for (i, text) in self.texts.iter().enumerate() {
            self.hidden[i] = self.run(block, i, text, see)?;
        }
        Ok(())
    }

    fn run(&self, block: &Decoder, i: usize, text: &[u32], see: &mut See<'_>) -> Result<Vec<f32>, ModelError> {
        let mut x = self.hidden[i].clone();
        debug_assert_eq!(x.len(), text.len() * self.width);
        let mut cache = block.new_sequence();
        let mut failed = None;
        block.run_blocks(0, &mut [Step { cache: &mut cache, tokens: text }], &mut x, &mut |site, rows| {
            if failed.is_none() {
                failed = see(i, site, rows).err();
            }
        });
        failed.map_or(Ok(x), Err)
    }
}
