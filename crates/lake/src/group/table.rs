//! The groups of a partial aggregation. A row finds its group through the codes that its words have in the file's
//! dictionaries: two additions and one look-up in a small array, where comparing the words themselves would cost ten times that.

use arrow::array::{Array as _, ArrayRef, AsArray as _, BooleanArray, DictionaryArray, RecordBatch, StringBuilder};
use arrow::datatypes::{Int32Type, SchemaRef};
use datafusion::error::{DataFusionError, Result};
use datafusion::logical_expr::{EmitTo, GroupsAccumulator};
use datafusion::physical_expr::aggregate::AggregateFunctionExpr;
use std::collections::HashMap;
use std::sync::Arc;

/// Words of a group column, as the Parquet reader hands them out.
pub(super) type Words = DictionaryArray<Int32Type>;

/// Combinations of words for which an array is kept; beyond it every row is looked up in hash maps.
const DENSE: usize = 1 << 20;
/// Not looked up yet.
const UNKNOWN: u32 = u32::MAX;

/// Numbers the different words of one column; 0 is NULL.
#[derive(Default)]
struct Numbers {
    of: HashMap<Box<str>, u32>,
    words: Vec<Box<str>>,
}

impl Numbers {
    fn number(&mut self, word: &str) -> Result<u32> {
        if let Some(n) = self.of.get(word) {
            return Ok(*n);
        }
        let n = u32::try_from(self.words.len() + 1).map_err(|e| DataFusionError::External(Box::new(e)))?;
        self.words.push(word.into());
        self.of.insert(word.into(), n);
        Ok(n)
    }

    fn word(&self, number: u32) -> Option<&str> {
        let place = (number as usize).checked_sub(1)?;
        self.words.get(place).map(AsRef::as_ref)
    }
}

/// The dictionary that the last rows of a column had, with the numbers of its words. Place 0 is NULL.
#[derive(Default)]
struct Dictionary {
    values: Option<ArrayRef>,
    numbers: Vec<u32>,
}

impl Dictionary {
    /// Takes over the dictionary of `rows`; whether it is another one.
    fn follow(&mut self, rows: &Words, numbers: &mut Numbers) -> Result<bool> {
        let values = rows.values();
        let text = values
            .as_string_opt::<i32>()
            .ok_or_else(|| DataFusionError::Internal("a dictionary of something else than text".to_owned()))?;
        // the reader makes one array per dictionary page; held here, its memory cannot be used for another one
        let same = self.values.as_ref().and_then(|v| v.as_string_opt::<i32>()).is_some_and(|old| {
            old.len() == text.len()
                && old.value_data().as_ptr() == text.value_data().as_ptr()
                && old.offsets().as_ptr() == text.offsets().as_ptr()
        });
        if same {
            return Ok(false);
        }
        self.numbers.clear();
        self.numbers.push(0);
        for word in text {
            self.numbers.push(word.map_or(Ok(0), |w| numbers.number(w))?);
        }
        self.values = Some(Arc::clone(values));
        Ok(true)
    }
}

/// Groups with their aggregates.
pub(super) struct GroupTable {
    schema: SchemaRef,
    numbers: Vec<Numbers>,
    dictionaries: Vec<Dictionary>,
    /// Per column: the place of (place after the columns before it, number of the word). That after the last is the group.
    places: Vec<HashMap<u64, u32>>,
    /// The numbers of each group, one after the other.
    keys: Vec<u32>,
    groups: usize,
    /// Group of a combination of codes in the present dictionaries.
    dense: Vec<u32>,
    aggregates: Vec<Box<dyn GroupsAccumulator>>,
    /// Scratch: combination and group of each row.
    combination: Vec<u32>,
    group: Vec<usize>,
}

impl GroupTable {
    /// Groups over `columns` words whose partial states have `schema`.
    pub fn new(schema: SchemaRef, columns: usize, aggregates: &[Arc<AggregateFunctionExpr>]) -> Result<Self> {
        let aggregates = aggregates.iter().map(|a| a.create_groups_accumulator()).collect::<Result<_>>()?;
        Ok(Self {
            schema,
            numbers: (0..columns).map(|_| Numbers::default()).collect(),
            dictionaries: (0..columns).map(|_| Dictionary::default()).collect(),
            places: vec![HashMap::new(); columns],
            keys: Vec::new(),
            groups: 0,
            dense: Vec::new(),
            aggregates,
            combination: Vec::new(),
            group: Vec::new(),
        })
    }

    pub fn groups(&self) -> usize {
        self.groups
    }

    /// Memory held, bytes, roughly.
    pub fn size(&self) -> usize {
        let words: usize = self.numbers.iter().flat_map(|n| &n.words).map(|w| 2 * w.len() + 64).sum();
        let places: usize = self.places.iter().map(|p| p.capacity() * 16).sum();
        let aggregates: usize = self.aggregates.iter().map(|a| a.size()).sum();
        words + places + aggregates + 4 * (self.keys.capacity() + self.dense.capacity()) + 12 * self.group.capacity()
    }

    /// Adds rows: their words per group column, and per aggregate its arguments and its filter.
    pub fn add(&mut self, words: &[&Words], arguments: &[(Vec<ArrayRef>, Option<BooleanArray>)]) -> Result<()> {
        self.find_groups(words)?;
        for (aggregate, (values, filter)) in self.aggregates.iter_mut().zip(arguments) {
            aggregate.update_batch(values, &self.group, filter.as_ref(), self.groups)?;
        }
        Ok(())
    }

    /// The groups with their partial states; the table is empty afterwards.
    pub fn take(&mut self) -> Result<Option<RecordBatch>> {
        if self.groups == 0 {
            return Ok(None);
        }
        let mut columns: Vec<ArrayRef> = Vec::new();
        let width = self.numbers.len();
        for (c, numbers) in self.numbers.iter().enumerate() {
            let mut column = StringBuilder::new();
            for key in self.keys.chunks_exact(width) {
                column.append_option(key.get(c).and_then(|n| numbers.word(*n)));
            }
            columns.push(Arc::new(column.finish()));
        }
        for aggregate in &mut self.aggregates {
            columns.extend(aggregate.state(EmitTo::All)?);
        }
        let rows = RecordBatch::try_new(Arc::clone(&self.schema), columns)?;
        self.keys.clear();
        self.groups = 0;
        self.places.iter_mut().for_each(HashMap::clear);
        // also the words: a column of ever new ones must not fill the memory
        self.numbers.iter_mut().for_each(|n| *n = Numbers::default());
        self.dictionaries.iter_mut().for_each(|d| *d = Dictionary::default());
        Ok(Some(rows))
    }

    /// Fills `self.group` with the group of each row.
    fn find_groups(&mut self, words: &[&Words]) -> Result<()> {
        let rows = words.first().map_or(0, |w| w.len());
        let mut changed = false;
        for ((words, dictionary), numbers) in words.iter().zip(&mut self.dictionaries).zip(&mut self.numbers) {
            changed |= dictionary.follow(words, numbers)?;
        }
        let sizes = self.dictionaries.iter().map(|d| d.numbers.len());
        let combinations = sizes.fold(1usize, usize::saturating_mul);
        self.group.clear();
        self.group.reserve(rows);
        if combinations > DENSE {
            for row in 0..rows {
                let group = self.find(|c| code(words, c, row))?;
                self.group.push(group as usize);
            }
            return Ok(());
        }
        if changed {
            self.dense.clear();
            self.dense.resize(combinations, UNKNOWN);
        }
        self.combine(words, rows);
        let combination = std::mem::take(&mut self.combination);
        for (row, at) in combination.iter().enumerate() {
            let mut group = self.dense.get(*at as usize).copied().unwrap_or(UNKNOWN);
            if group == UNKNOWN {
                group = self.find(|c| code(words, c, row))?;
                if let Some(slot) = self.dense.get_mut(*at as usize) {
                    *slot = group;
                }
            }
            self.group.push(group as usize);
        }
        self.combination = combination;
        Ok(())
    }

    /// Fills `self.combination`: the codes of a row as one number, mixed radix.
    fn combine(&mut self, words: &[&Words], rows: usize) {
        self.combination.clear();
        self.combination.resize(rows, 0);
        let mut stride = 1u32;
        for (words, dictionary) in words.iter().zip(&self.dictionaries) {
            let keys = words.keys();
            if let Some(valid) = keys.nulls().filter(|n| n.null_count() > 0) {
                for ((sum, key), valid) in self.combination.iter_mut().zip(keys.values()).zip(valid) {
                    *sum = sum.wrapping_add(stride.wrapping_mul(if valid { (*key as u32).wrapping_add(1) } else { 0 }));
                }
            } else {
                for (sum, key) in self.combination.iter_mut().zip(keys.values()) {
                    *sum = sum.wrapping_add(stride.wrapping_mul((*key as u32).wrapping_add(1)));
                }
            }
            // no overflow: the product of all sizes is at most `DENSE`
            stride = stride.wrapping_mul(dictionary.numbers.len() as u32);
        }
    }

    /// The group of the row whose codes `code` gives, made when it is new.
    fn find(&mut self, code: impl Fn(usize) -> usize) -> Result<u32> {
        let mut place = 0u32;
        let mut is_new = false;
        for (c, (places, dictionary)) in self.places.iter_mut().zip(&self.dictionaries).enumerate() {
            let number = dictionary.numbers.get(code(c)).copied().unwrap_or(0);
            let next = u32::try_from(places.len()).map_err(|e| DataFusionError::External(Box::new(e)))?;
            is_new = false;
            place = *places.entry(u64::from(place) << 32 | u64::from(number)).or_insert_with(|| {
                is_new = true;
                next
            });
        }
        if is_new {
            for (c, dictionary) in self.dictionaries.iter().enumerate() {
                self.keys.push(dictionary.numbers.get(code(c)).copied().unwrap_or(0));
            }
            self.groups += 1;
        }
        Ok(place)
    }
}

/// The code of a row in its column's dictionary, shifted by one: 0 is NULL.
fn code(words: &[&Words], column: usize, row: usize) -> usize {
    let Some(keys) = words.get(column).map(|w| w.keys()) else { return 0 };
    if keys.is_null(row) { 0 } else { usize::try_from(keys.value(row)).map_or(0, |k| k + 1) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use arrow::array::Int64Array;
    use arrow::datatypes::{DataType, Field, Schema};
    use datafusion::functions_aggregate::count::count_udaf;
    use datafusion::physical_expr::aggregate::AggregateExprBuilder;
    use datafusion::physical_expr::expressions::lit;
    use std::collections::BTreeMap;

    type Counts = BTreeMap<Vec<Option<String>>, i64>;

    fn words(list: &[Option<&str>]) -> Words {
        list.iter().copied().collect()
    }

    fn counting(columns: usize) -> GroupTable {
        let mut fields: Vec<Field> = (0..columns).map(|c| Field::new(format!("c{c}"), DataType::Utf8, true)).collect();
        fields.push(Field::new("n", DataType::Int64, true));
        let input = Arc::new(Schema::empty());
        let count = AggregateExprBuilder::new(count_udaf(), vec![lit(1i64)]).schema(input).alias("n").build().unwrap();
        GroupTable::new(Arc::new(Schema::new(fields)), columns, &[Arc::new(count)]).unwrap()
    }

    fn add(table: &mut GroupTable, columns: &[Words]) {
        let ones: ArrayRef = Arc::new(Int64Array::from(vec![1; columns[0].len()]));
        table.add(&columns.iter().collect::<Vec<_>>(), &[(vec![ones], None)]).unwrap();
    }

    fn take(table: &mut GroupTable, out: &mut Counts) {
        let Some(rows) = table.take().unwrap() else { return };
        let last = rows.num_columns() - 1;
        let counts = rows.column(last).as_primitive::<arrow::datatypes::Int64Type>();
        for i in 0..rows.num_rows() {
            let key = (0..last).map(|c| rows.column(c).as_string::<i32>());
            let key = key.map(|c| (!c.is_null(i)).then(|| c.value(i).to_owned())).collect();
            *out.entry(key).or_default() += counts.value(i);
        }
    }

    #[test]
    fn groups_do_not_depend_on_dictionaries_nulls_or_when_they_are_taken() {
        let mut state = 7u64;
        let mut below = |n: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % n
        };
        // few words go through the array, many through the maps
        for kinds in [[3, 2, 5], [400, 300, 200]] {
            let mut table = counting(3);
            let (mut wanted, mut got) = (Counts::new(), Counts::new());
            for piece in 0..40 {
                let columns = kinds.map(|k| {
                    let mut one = || (below(7) > 0).then(|| format!("w{}", below(k)));
                    (0..500).map(|_| one()).collect::<Vec<_>>()
                });
                for row in 0..500 {
                    *wanted.entry(columns.iter().map(|c| c[row].clone()).collect()).or_default() += 1;
                }
                let encoded: Vec<Words> =
                    columns.iter().map(|c| words(&c.iter().map(Option::as_deref).collect::<Vec<_>>())).collect();
                // the same dictionaries twice, of which the second half is cut away
                add(&mut table, &encoded.iter().map(|w| w.slice(0, 250)).collect::<Vec<_>>());
                add(&mut table, &encoded.iter().map(|w| w.slice(250, 250)).collect::<Vec<_>>());
                if piece % 16 == 5 {
                    take(&mut table, &mut got);
                }
            }
            take(&mut table, &mut got);
            assert_eq!(got, wanted);
            assert!(table.take().unwrap().is_none() && table.groups() == 0);
        }
    }
}
