//! Adapters in the folders of PEFT (<https://github.com/huggingface/peft>): `adapter_config.json` and
//! `adapter_model.safetensors`, read and written.
//!
//! PEFT works on the model as transformers has it, where queries and keys of llama hold the halves of rotated pairs; in a
//! GGUF file of that architecture they are neighbours. The rows of `B` are put in order on the way.

use super::{Adapter, Arch, ModelConfig, ModelError, Pair, Target};
use crate::convert::interleave;
use crate::safetensors_file::SafetensorsFile;
use safetensors::{Dtype, tensor::TensorView};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::{fs, path::Path};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// Our own note in the weights: the digest of the base.
const BASE_NOTE: &str = "flywheel.base_sha256";
/// Longest configuration that is read, bytes.
const LONGEST: u64 = 1 << 20;

/// What of a configuration matters here; PEFT writes `null` for what is not used.
#[derive(Debug, Deserialize)]
struct Config {
    peft_type: String,
    r: usize,
    lora_alpha: f32,
    use_rslora: Option<bool>,
    use_dora: Option<bool>,
    fan_in_fan_out: Option<bool>,
    lora_bias: Option<bool>,
    bias: Option<String>,
    modules_to_save: Option<Vec<String>>,
    rank_pattern: Option<BTreeMap<String, serde::de::IgnoredAny>>,
    alpha_pattern: Option<BTreeMap<String, serde::de::IgnoredAny>>,
}

impl Config {
    fn read(path: &Path) -> Result<Self, ModelError> {
        let bad = |what: String| ModelError::adapter(format!("{}: {what}", path.display()));
        let size = fs::metadata(path).map_err(|e| bad(e.to_string()))?.len();
        if size > LONGEST {
            return Err(bad(format!("{size} bytes are too many for a configuration")));
        }
        let text = fs::read(path).map_err(|e| bad(e.to_string()))?;
        let this: Self = serde_json::from_slice(&text).map_err(|e| bad(format!("not a LoRA configuration: {e}")))?;
        match this.problem() {
            Some(problem) => Err(bad(problem)),
            None => Ok(this),
        }
    }

    /// What this crate would compute differently.
    fn problem(&self) -> Option<String> {
        let on = |flag: Option<bool>| flag.unwrap_or(false);
        let any = |map: &Option<BTreeMap<_, _>>| map.as_ref().is_some_and(|m| !m.is_empty());
        if self.peft_type != "LORA" {
            return Some(format!("`peft_type` is `{}`, only `LORA` can be read", self.peft_type));
        }
        if self.r == 0 {
            return Some("rank `r` is 0".into());
        }
        let unknown = [
            ("use_dora", on(self.use_dora)),
            ("fan_in_fan_out", on(self.fan_in_fan_out)),
            ("lora_bias", on(self.lora_bias)),
            ("bias", self.bias.as_deref().is_some_and(|b| b != "none")),
            ("modules_to_save", self.modules_to_save.as_ref().is_some_and(|m| !m.is_empty())),
            ("alpha_pattern", any(&self.alpha_pattern)),
            ("rank_pattern", any(&self.rank_pattern)),
        ];
        let name = unknown.into_iter().find(|(_, used)| *used)?.0;
        Some(format!("`{name}` is used, which adapters here do not have; train without it"))
    }

    /// The plain alpha: `use_rslora` divides by the root of the rank instead of the rank.
    fn alpha(&self) -> f32 {
        self.lora_alpha * if self.use_rslora.unwrap_or(false) { (self.r as f32).sqrt() } else { 1.0 }
    }
}

impl Target {
    /// Name in transformers, below the layer.
    fn module(self) -> &'static str {
        match self {
            Self::Q => "self_attn.q_proj",
            Self::K => "self_attn.k_proj",
            Self::V => "self_attn.v_proj",
            Self::O => "self_attn.o_proj",
            Self::Gate => "mlp.gate_proj",
            Self::Up => "mlp.up_proj",
            Self::Down => "mlp.down_proj",
        }
    }
    /// Heads whose rows have another order in a GGUF file.
    fn turned_heads(self, c: &ModelConfig) -> Option<usize> {
        match self {
            Self::Q => Some(c.heads),
            Self::K => Some(c.kv_heads),
            _ => None,
        }
        .filter(|_| c.arch == Arch::Llama)
    }
}

/// Layer, matrix and half (`A` first) of a tensor's name.
fn parse(name: &str) -> Option<(usize, Target, usize)> {
    let rest = name.strip_prefix("base_model.model.").unwrap_or(name).strip_prefix("model.layers.")?;
    let (layer, rest) = rest.split_once('.')?;
    let (module, half) = match rest.strip_suffix(".lora_A.weight") {
        Some(module) => (module, 0),
        None => (rest.strip_suffix(".lora_B.weight")?, 1),
    };
    let target = Target::ALL.into_iter().find(|t| t.module() == module)?;
    Some((layer.parse().ok()?, target, half))
}

fn tensor_name(layer: usize, target: Target, half: usize) -> String {
    let half = ["lora_A", "lora_B"][half];
    format!("base_model.model.model.layers.{layer}.{}.{half}.weight", target.module())
}

impl Adapter {
    /// Reads an adapter folder for a model of configuration `c`.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] with its own message for each: a missing or foreign configuration, a feature that is not plain
    /// LoRA, a tensor that no adapter here has (`lm_head`, embeddings), half of a pair, a rank that is not the
    /// configuration's, a shape that is not the model's, values that are not finite.
    pub fn from_peft(folder: &Path, c: &ModelConfig) -> Result<Self, ModelError> {
        let config = Config::read(&folder.join(CONFIG))?;
        let file = SafetensorsFile::open(&folder.join(WEIGHTS)).map_err(|e| ModelError::adapter(e.to_string()))?;
        let mut pairs = BTreeMap::new();
        for name in file.names() {
            let (layer, target, half) = parse(&name)
                .ok_or_else(|| ModelError::adapter(format!("`{name}` is not a matrix that can be adapted here")))?;
            let other = tensor_name(layer, target, 1 - half);
            let short = other.trim_start_matches("base_model.model.");
            if file.find(&other).is_none() && file.find(short).is_none() {
                return Err(ModelError::adapter(format!("`{name}` has no partner `{other}`")));
            }
            let values = half_values(&file, &name, layer, target, half, config.r, c)?;
            pairs.entry((layer, target)).or_insert_with(|| [Vec::new(), Vec::new()])[half] = values;
        }
        let pairs = pairs.into_iter().map(|(at, [a, b])| (at, Pair { rank: config.r, a, b }));
        Self::new(c.arch, config.alpha(), file.note(BASE_NOTE), pairs)
    }

    /// Writes a folder that `PeftModel.from_pretrained` loads onto the model that a model of configuration `c` was converted
    /// from; `base_model` is the name of that model, which PEFT shows and may look for.
    ///
    /// # Errors
    /// [`ModelError::Adapter`] if ranks differ, shapes are not those of `c`, or the folder cannot be written.
    pub fn write_peft(&self, folder: &Path, c: &ModelConfig, base_model: &str) -> Result<(), ModelError> {
        self.check_shapes(c)?;
        let ranks: std::collections::BTreeSet<usize> = self.pairs().map(|(_, _, pair)| pair.rank).collect();
        let (Some(rank), 1) = (ranks.first(), ranks.len()) else {
            return Err(ModelError::adapter(format!("a PEFT adapter has one rank, this one has {ranks:?}")));
        };
        let config = serde_json::to_vec_pretty(&self.peft_config(*rank, c.layers, base_model));
        let config = config.map_err(|e| ModelError::adapter(e.to_string()))?;
        let weights = self.peft_weights(c)?;
        fs::create_dir_all(folder).map_err(|e| ModelError::adapter(format!("{}: {e}", folder.display())))?;
        for (name, bytes) in [(WEIGHTS, weights), (CONFIG, config)] {
            let path = folder.join(name);
            let bad = |e: std::io::Error| ModelError::adapter(format!("{}: {e}", path.display()));
            crate::files::replace(&path, &bad, |out| out.write_all(&bytes).map_err(bad))?;
        }
        Ok(())
    }

    fn peft_config(&self, rank: usize, layers: usize, base_model: &str) -> Written {
        let mut modules: BTreeMap<Target, Vec<usize>> = BTreeMap::new();
        self.pairs().for_each(|(layer, target, _)| modules.entry(target).or_default().push(layer));
        let everywhere = modules.values().all(|l| l.len() == layers);
        let target_modules = if everywhere {
            modules.keys().map(|t| t.module().rsplit('.').next().unwrap_or_default().to_owned()).collect()
        } else {
            self.pairs().map(|(layer, target, _)| format!("layers.{layer}.{}", target.module())).collect()
        };
        Written {
            peft_type: "LORA",
            task_type: "CAUSAL_LM",
            base_model_name_or_path: base_model.to_owned(),
            r: rank,
            lora_alpha: self.alpha,
            lora_dropout: 0.0,
            target_modules,
            bias: "none",
            fan_in_fan_out: false,
            use_rslora: false,
            use_dora: false,
            inference_mode: true,
            init_lora_weights: true,
        }
    }

    fn peft_weights(&self, c: &ModelConfig) -> Result<Vec<u8>, ModelError> {
        let mut tensors = Vec::new();
        for (layer, target, pair) in self.pairs() {
            let (outputs, inputs) = target.shape(c);
            let b = match target.turned_heads(c) {
                Some(heads) => halves(&pair.b, heads, pair.rank),
                None => pair.b.clone(),
            };
            let bytes = |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|v| v.to_le_bytes()).collect() };
            tensors.push((tensor_name(layer, target, 0), vec![pair.rank, inputs], bytes(&pair.a)));
            tensors.push((tensor_name(layer, target, 1), vec![outputs, pair.rank], bytes(&b)));
        }
        let failed = |e: safetensors::SafeTensorError| ModelError::adapter(e.to_string());
        let views = tensors
            .iter()
            .map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes).map_err(failed)?)));
        let views = views.collect::<Result<Vec<_>, ModelError>>()?;
        let base = self.base_sha256.iter().map(|digest| (BASE_NOTE.to_owned(), digest.clone()));
        let notes: HashMap<String, String> = base.chain([("format".to_owned(), "pt".to_owned())]).collect();
        safetensors::serialize(views, Some(notes)).map_err(failed)
    }
}

/// `adapter_config.json` as PEFT reads it.
#[derive(Serialize)]
struct Written {
    peft_type: &'static str,
    task_type: &'static str,
    base_model_name_or_path: String,
    r: usize,
    lora_alpha: f32,
    lora_dropout: f32,
    target_modules: Vec<String>,
    bias: &'static str,
    fan_in_fan_out: bool,
    use_rslora: bool,
    use_dora: bool,
    inference_mode: bool,
    init_lora_weights: bool,
}

/// Values of `A` (`rank × inputs`) or `B` (`outputs × rank`, rows as in a GGUF file), checked.
fn half_values(
    file: &SafetensorsFile,
    name: &str,
    layer: usize,
    target: Target,
    half: usize,
    rank: usize,
    c: &ModelConfig,
) -> Result<Vec<f32>, ModelError> {
    let failed = |what: String| ModelError::adapter(format!("`{name}`: {what}"));
    let view = file.find(name).ok_or_else(|| failed("it is not in the file".into()))?;
    let (outputs, inputs) = target.shape(c);
    let &[rows, cols] = view.shape else { return Err(failed(format!("shape {:?} is not a matrix", view.shape))) };
    let (found, size, want) = if half == 0 { (rows, cols, inputs) } else { (cols, rows, outputs) };
    if found != rank {
        return Err(failed(format!("rank {found}, the configuration says {rank}")));
    }
    if size != want || layer >= c.layers {
        let what = format!("the model's matrix is {outputs} × {inputs} in {} layers", c.layers);
        return Err(failed(format!("shape {:?}; {what}", view.shape)));
    }
    let values = view.values().map_err(|e| ModelError::adapter(e.to_string()))?;
    Ok(match target.turned_heads(c).filter(|_| half == 1) {
        Some(heads) => interleave(&values, heads, rank),
        None => values,
    })
}

/// The opposite of [`interleave`]: rows `2 i` and `2 i + 1` of a head become rows `i` and `i + half`.
fn halves(values: &[f32], heads: usize, cols: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(values.len());
    for head in values.chunks_exact(values.len() / heads) {
        for first in [0, 1] {
            head.chunks_exact(cols).skip(first).step_by(2).for_each(|row| out.extend_from_slice(row));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tests::{some_adapter, tiny};

    fn folder_with(arch: Arch) -> (tempfile::TempDir, Adapter, ModelConfig) {
        let model = tiny(arch);
        let adapter = some_adapter(&model, 3);
        let folder = tempfile::tempdir().unwrap();
        adapter.write_peft(folder.path(), model.config(), "some/model").unwrap();
        (folder, adapter, model.config().clone())
    }

    #[test]
    fn an_adapter_survives_its_folder() {
        for arch in [Arch::Llama, Arch::Qwen2, Arch::Qwen3] {
            let (folder, adapter, c) = folder_with(arch);
            assert_eq!(Adapter::from_peft(folder.path(), &c).unwrap(), adapter);
            let config: serde_json::Value =
                serde_json::from_slice(&fs::read(folder.path().join(CONFIG)).unwrap()).unwrap();
            assert_eq!((config["r"].as_u64(), config["lora_alpha"].as_f64()), (Some(3), Some(6.0)));
            assert_eq!(config["target_modules"].as_array().unwrap().len(), 7);
        }
    }

    #[test]
    fn rows_of_llama_queries_are_turned_and_others_are_not() {
        let (folder, adapter, c) = folder_with(Arch::Llama);
        let file = SafetensorsFile::open(&folder.path().join(WEIGHTS)).unwrap();
        let stored = |t: Target| {
            let name = tensor_name(0, t, 1);
            file.find(&name).unwrap().values().unwrap()
        };
        let ours = |t: Target| adapter.pairs().find(|(l, x, _)| (*l, *x) == (0, t)).unwrap().2.b.clone();
        // heads of 8: row 1 of a GGUF head is the second half's first
        let (q, own) = (stored(Target::Q), ours(Target::Q));
        assert_eq!((&q[..3], &q[4 * 3..5 * 3]), (&own[..3], &own[3..6]));
        assert_eq!(stored(Target::V), ours(Target::V));
        assert_eq!(interleave(&halves(&own, c.heads, 3), c.heads, 3), own);
        assert_eq!(file.names()[0], "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight");
    }

    #[test]
    fn a_part_of_the_layers_is_named_in_full() {
        let model = tiny(Arch::Llama);
        let all = some_adapter(&model, 2);
        let one = all.pairs().filter(|(l, t, _)| (*l, *t) == (1, Target::Up)).map(|(l, t, p)| ((l, t), p.clone()));
        let one = Adapter::new(Arch::Llama, 4.0, None, one).unwrap();
        let folder = tempfile::tempdir().unwrap();
        one.write_peft(folder.path(), model.config(), "m").unwrap();
        let text = fs::read_to_string(folder.path().join(CONFIG)).unwrap();
        assert!(text.contains("\"layers.1.mlp.up_proj\""), "{text}");
        assert_eq!(Adapter::from_peft(folder.path(), model.config()).unwrap(), one);
        let mixed = all.pairs().map(|(l, t, p)| ((l, t), p.clone())).take(1);
        let wide = Pair { rank: 1, a: vec![0.1; 24], b: vec![0.1; 40] };
        let mixed = Adapter::new(Arch::Llama, 4.0, None, mixed.chain([((1, Target::Up), wide)])).unwrap();
        let e = mixed.write_peft(folder.path(), model.config(), "m").unwrap_err().to_string();
        assert!(e.contains("one rank"), "{e}");
    }

    /// Names, shapes and values.
    type Tensors = Vec<(String, Vec<usize>, Vec<u8>)>;

    /// What is said of a folder whose configuration and weights were changed.
    fn refused(config: &dyn Fn(String) -> String, change: &dyn Fn(&mut Tensors)) -> String {
        let (folder, _, c) = folder_with(Arch::Llama);
        let path = folder.path().join(CONFIG);
        fs::write(&path, config(fs::read_to_string(&path).unwrap())).unwrap();
        let path = folder.path().join(WEIGHTS);
        let file = SafetensorsFile::open(&path).unwrap();
        let mut tensors: Tensors = file
            .names()
            .into_iter()
            .map(|name| {
                let view = file.find(&name).unwrap();
                let (shape, bytes) = (view.shape.to_vec(), view.bytes.to_vec());
                (name, shape, bytes)
            })
            .collect();
        change(&mut tensors);
        let views = tensors.iter().map(|(n, s, b)| (n, TensorView::new(Dtype::F32, s.clone(), b).unwrap()));
        let bytes = safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, bytes).unwrap();
        Adapter::from_peft(folder.path(), &c).unwrap_err().to_string()
    }

    #[test]
    fn what_is_not_this_models_adapter_is_refused_with_its_own_message() {
        let same = |text: String| text;
        let keep = |_: &mut Tensors| ();
        let swap = |from: &'static str, to: &'static str| move |text: String| text.replace(from, to);
        assert!(refused(&swap("LORA", "IA3"), &keep).contains("`peft_type` is `IA3`"));
        assert!(refused(&swap("\"r\": 3", "\"r\": 0"), &keep).contains("rank `r` is 0"));
        assert!(refused(&swap("\"r\": 3", "\"r\": 4"), &keep).contains("rank 3, the configuration says 4"));
        assert!(refused(&swap("\"lora_alpha\": 6.0", "\"lora_alpha\": 0.0"), &keep).contains("alpha is 0"));
        assert!(refused(&swap("\"use_dora\": false", "\"use_dora\": true"), &keep).contains("`use_dora`"));
        assert!(refused(&swap("\"none\"", "\"all\""), &keep).contains("`bias`"));
        assert!(refused(&|_| "{}".into(), &keep).contains("not a LoRA configuration"));
        assert!(refused(&same, &|t| drop(t.remove(0))).contains("has no partner"));
        let rename = |t: &mut Tensors| t[0].0 = "base_model.model.lm_head.lora_A.weight".into();
        assert!(refused(&same, &rename).contains("lm_head"));
        let reshape = |t: &mut Tensors| {
            let a = t.iter_mut().find(|(name, ..)| name.ends_with("0.self_attn.q_proj.lora_A.weight")).unwrap();
            (a.1, a.2) = (vec![3, 23], vec![0; 3 * 23 * 4]);
        };
        assert!(refused(&same, &reshape).contains("32 × 24 in 2 layers"));
        let poison = |t: &mut Tensors| t[0].2[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        assert!(refused(&same, &poison).contains("value 0 is NaN"));
        let none = Adapter::from_peft(Path::new("no-such-folder"), tiny(Arch::Llama).config());
        assert!(none.unwrap_err().to_string().contains("adapter_config.json"));
    }
}
